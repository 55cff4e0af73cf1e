"""Builders of the Jobs of all roles, and runs to build them from."""

from typing import Any

from finetune_job.names import Role
from finetune_job.plan.digest import plan_sha256
from finetune_operator.children.cpu_jobs import cpu_job
from finetune_operator.children.frozen_run import FrozenRun, Owner
from finetune_operator.children.train_job import train_job
from tests.support.builders import UID, JobBuilder, a_job

OWNER = Owner("team", "tune", UID)


def job_of(role: Role, run: FrozenRun, attempt: int = 0) -> dict[str, Any]:
    """The Job of a role."""
    return train_job(run, attempt) if role is Role.TRAIN else cpu_job(run, role, attempt)


ELSEWHERE = (
    a_job()
    .spec("model", {"source": "hf://org/base", "revision": "a" * 40})
    .spec("data.source", "s3://bucket/train.jsonl")
    .spec("fetch", {"hubTokenSecretRef": {"name": "hub", "key": "read"}, "s3SecretRef": {"name": "store"}})
)
"""A job whose model and data are fetched with credentials."""


def run_of(job: JobBuilder) -> FrozenRun:
    plan = job.plan()
    return FrozenRun(Owner("team", plan.job.name, UID), plan, plan.placement, plan_sha256(plan))


def pod_spec(body: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = body["spec"]["template"]["spec"]
    return spec

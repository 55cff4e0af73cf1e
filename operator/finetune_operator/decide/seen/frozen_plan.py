"""Reads the frozen plan from its ConfigMap and checks it against the digest in status. A frozen plan is never resolved again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from pydantic import ValidationError

from finetune_job.names import plan_configmap_name
from finetune_job.plan.digest import text_sha256
from finetune_job.plan.launch_plan import read_launch_plan
from finetune_operator.children.frozen_run import FrozenRun, Owner
from finetune_operator.decide.seen.observed import Observed


@dataclass(frozen=True)
class PlanLost:
    """Why the job cannot continue: its plan is missing or wrong."""

    message: str


REMEMBERED = 64
"""Number of parsed plans to cache, at about 25 kB each. A plan never changes, and a job often has several passes in a row."""
_read = lru_cache(REMEMBERED)(read_launch_plan)


def frozen_plan(observed: Observed) -> FrozenRun | PlanLost:
    """Return the run of a started job with its plan, or why the plan is missing or unusable."""
    expected = observed.job.status.plan
    name = plan_configmap_name(observed.job.name)
    if expected is None:
        return PlanLost("status.plan is missing although the job has started.")
    if observed.plan is None:
        return PlanLost(f"ConfigMap {name} with the frozen plan is gone. Restore it with the content of digest {expected.hash}.")
    digest = text_sha256(observed.plan.plan_json)
    if digest != expected.hash:
        return PlanLost(f"ConfigMap {name} has digest {digest}, but the run started with {expected.hash}. Restore its content.")
    try:
        plan = _read(observed.plan.plan_json)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        return PlanLost(
            f"ConfigMap {name} holds a plan that this release of the operator cannot read ({field}: {first['msg']}). The job's "
            "pods are left as they are. Install the release of the operator that froze the plan, or a later one."
        )
    if plan.placement is None:
        return PlanLost(f"ConfigMap {name} holds a plan without placement, made for local mode.")
    job = observed.job
    return FrozenRun(Owner(job.namespace, job.name, job.uid), plan, plan.placement, digest)

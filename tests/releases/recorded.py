"""What `record.py` kept of the releases, as objects of the API server and as the operator's view of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.api.status import FineTuneJobStatus
from finetune_job.conditions import is_condition_true
from finetune_job.names import PLAN_KEY
from finetune_job.reasons import ConditionType
from finetune_job.stored_status import read_status
from finetune_operator.cache.projection import batch_job_view, pod_view
from finetune_operator.decide.actions import Create, Delete
from finetune_operator.decide.seen.children_seen import BatchJobView, ConfigMapView
from tests.support.builders import JobBuilder
from tests.support.simulated_cluster import Children, SimulatedCluster

Document = dict[str, Any]
DIRECTORY = Path(__file__).parent
RELEASES = sorted(path.stem for path in DIRECTORY.glob("*.json"))
"""Oldest first: an ordinal, and the commit that was recorded."""
SCENARIOS = ("on-claims", "elsewhere", "whole")


@cache
def recording(release: str) -> Document:
    """Everything that was recorded of a release."""
    content: Document = json.loads((DIRECTORY / f"{release}.json").read_text())
    return content


def stages() -> list[tuple[str, str, str]]:
    """Release, scenario and stage of every snapshot."""
    return [
        (release, scenario, stage)
        for release in RELEASES
        for scenario in SCENARIOS
        if scenario in recording(release)
        for stage in sorted(recording(release)[scenario]["stages"])
    ]


@dataclass
class TakenOverCluster(SimulatedCluster):
    """A cluster with the objects of another release, and what this one has done to them."""

    found: frozenset[str] = frozenset()
    """Kind and name of what was there at the beginning."""
    made: list[Create] = field(default_factory=list)
    deleted_while_running: list[str] = field(default_factory=list)

    def _check_status(self, after: FineTuneJobStatus) -> None:
        if after.plan is not None and not self.found and not self.made:
            # Frozen by the other release, and not one child made: its plan is nowhere but in its memory, so it is frozen again.
            self.status = self.status.model_copy(update={"plan": after.plan})
        super()._check_status(after)

    def _create(self, action: Create) -> None:
        before = len(self.created)
        super()._create(action)
        if len(self.created) > before:
            self.made.append(action)

    def _delete(self, action: Delete) -> None:
        jobs = {job.uid: job for job in self.children.batch_jobs}
        job = jobs.get(action.uid)
        pods = () if job is None else (pod for pod in self.children.pods if (pod.role, pod.attempt) == (job.role, job.attempt))
        self.deleted_while_running += [pod.name for pod in pods if pod.phase == "Running" and pod.deletion_requested is None]
        super()._delete(action)


def taken_over(release: str, scenario: str, stage: str) -> TakenOverCluster:
    """The cluster at a stage of a release, read as the operator reads it."""
    recorded = recording(release)[scenario]
    snapshot = recorded["stages"][stage]
    # The API server prunes what the present definition does not know.
    spec = FineTuneJobSpec.model_validate(recorded["job"]["spec"], extra="ignore")
    manifest = recorded["job"] | {"spec": spec.model_dump(mode="json", by_alias=True, exclude_none=True)}
    profile = FineTuneProfileSpec.model_validate(recorded["profile"] | _ways_out(recorded["profile"]), extra="ignore")
    cluster = TakenOverCluster(JobBuilder(manifest, profile))
    cluster.now = datetime.fromisoformat(snapshot["now"])
    cluster.status = read_status(snapshot["status"])
    plan = None
    if "ConfigMap/tune-plan" in snapshot["children"]:
        plan = ConfigMapView("tune-plan", "uid-plan", recorded["bodies"]["ConfigMap/tune-plan"]["data"][PLAN_KEY])
    pods = [pod_view(recorded["states"][number]) for number in snapshot["pods"]]
    cluster.children = Children(
        batch_jobs=tuple(_batch_job(recorded, recorded["states"][number]) for number in snapshot["jobs"]),
        pods=tuple(pod for pod in pods if pod is not None),
        plan=plan,
        service_exists="Service/tune-gang" in snapshot["children"],
        claims=cluster.children.claims,
    )
    assert len(cluster.children.pods) == len(snapshot["pods"]), "every pod is understood"
    cluster.seen = [cluster.children]
    cluster.uids = 1000
    cluster.found = frozenset(snapshot["children"])
    return cluster


def _batch_job(recorded: Document, state: Document) -> BatchJobView:
    body = recorded["bodies"][f"Job/{state['metadata']['name']}"]
    view = batch_job_view(body | {"metadata": body["metadata"] | state["metadata"], "status": state["status"]})
    assert view is not None, "every Job is understood"
    return view


def has_succeeded(cluster: SimulatedCluster) -> bool:
    """Whether the job ended well."""
    return is_condition_true(cluster.status.conditions, ConditionType.SUCCEEDED)


def _ways_out(profile: dict[str, Any]) -> dict[str, Any]:
    """What an administrator writes at the upgrade: until then a profile without lists let everything through."""
    return {
        "fetch": {"allowedSources": ["hf://", "s3://"], **profile.get("fetch", {})},
        "publish": {"allowedDestinations": ["hf://", "s3://", "oci://"], **profile.get("publish", {})},
    }

"""Publication: the results are copied out of the cluster, by the one pod that has credentials to write there."""

from __future__ import annotations

from finetune_job.api.status import Artifact
from finetune_job.names import Role
from finetune_job.plan.launch_plan import LaunchPlan
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.children.frozen_run import FrozenRun
from finetune_operator.children.publish_job import publish_job
from finetune_operator.decide.finish import finish_succeeded
from finetune_operator.decide.job_state import JobState
from finetune_operator.decide.observed import Observed
from finetune_operator.decide.pass_result import TEXT_LIMIT, PassResult
from finetune_operator.decide.role_stage import RoleStage

ARTIFACT_NAME = "published"
_ALGORITHM = "sha256:"
_SHA256_LENGTH = 64


def publish_stage(observed: Observed, result: PassResult, run: FrozenRun) -> bool:
    """One pass while the results are on the workspace and not yet where they belong."""
    stage = RoleStage(observed, result, Role.PUBLISH)
    return stage.drive(lambda: publish_job(run, stage.attempt), lambda found: _succeeded(observed, result, found, run.plan))


def _succeeded(observed: Observed, result: PassResult, found: JobState, plan: LaunchPlan) -> bool:
    report = found.report
    artifact = published_artifact(plan, report.facts if report is not None else {})
    result.set(artifacts=[artifact])
    result.condition(ConditionType.PUBLISHED, True, Reason.COMPLETED, report.message if report is not None else "")
    finish_succeeded(observed, result, f"Results are at {artifact.path}.")
    return False


def published_artifact(plan: LaunchPlan, facts: dict[str, str]) -> Artifact:
    """What the container reported of the place: its address, and its digest where that is a SHA-256 (a Git commit is none)."""
    destination = plan.publish.destination if plan.publish is not None else ""
    digest = facts.get("digest", "").removeprefix(_ALGORITHM)
    return Artifact(
        name=ARTIFACT_NAME,
        path=(facts.get("address") or destination)[:TEXT_LIMIT],
        sha256=digest if len(digest) == _SHA256_LENGTH else "",
    )

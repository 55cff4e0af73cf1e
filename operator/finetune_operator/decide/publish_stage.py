"""Publication: the results are copied out of the cluster, by the one pod that has credentials to write there.

What a long training made is never lost to a destination: where other jobs would fail for good, this one is stalled with its results
on the workspace, and `spec.run.retry` has it try again.
"""

from __future__ import annotations

from finetune_job.api.status import Artifact
from finetune_job.names import Role
from finetune_job.plan.launch_plan import LaunchPlan
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.children.frozen_run import FrozenRun
from finetune_operator.children.publish_job import publish_job
from finetune_operator.decide.classify import Failure
from finetune_operator.decide.draft import TEXT_LIMIT, Draft
from finetune_operator.decide.finish import finish_succeeded
from finetune_operator.decide.observed import Observed
from finetune_operator.decide.refusal import refuse, wait_for_retry
from finetune_operator.decide.restart_policy import Verdict, verdict
from finetune_operator.decide.role_stage import RoleStage
from finetune_operator.decide.standing import Standing

ARTIFACT_NAME = "published"
_ALGORITHM = "sha256:"
_SHA256_LENGTH = 64


def publish_stage(observed: Observed, draft: Draft, run: FrozenRun) -> None:
    """One pass while the results are on the workspace and not yet where they belong."""
    stage = RoleStage(observed, draft, Role.PUBLISH, waits_on=True)
    if not wait_for_retry(stage):
        stage.drive(
            lambda: publish_job(run, stage.attempt),
            lambda stands: _succeeded(draft, stands, run.plan),
            lambda failure: _kept(stage, failure),
        )


def _kept(stage: RoleStage, failure: Failure) -> bool:
    """Stall the job where this failure is not tried again. False: another attempt follows."""
    status, spec = stage.observed.job.status, stage.observed.job.spec
    if spec is None or verdict(failure.failure, status.restarts, spec.run.max_restarts) not in (Verdict.STOP, Verdict.EXHAUSTED):
        return False
    refuse(stage.observed, stage.draft, stage.role, failure)
    return True


def _succeeded(draft: Draft, stands: Standing, plan: LaunchPlan) -> None:
    report = stands.report
    artifact = published_artifact(plan, report.facts if report is not None else {})
    draft.set(artifacts=[artifact])
    draft.condition(ConditionType.PUBLISHED, True, Reason.COMPLETED, report.message if report is not None else "")
    finish_succeeded(draft, f"Results are at {artifact.path}.")


def published_artifact(plan: LaunchPlan, facts: dict[str, str]) -> Artifact:
    """What the container reported of the place: its address, and its digest where that is a SHA-256 (a Git commit is none)."""
    destination = plan.publish.destination if plan.publish is not None else ""
    digest = facts.get("digest", "").removeprefix(_ALGORITHM)
    return Artifact(
        name=ARTIFACT_NAME,
        path=(facts.get("address") or destination)[:TEXT_LIMIT],
        sha256=digest if len(digest) == _SHA256_LENGTH else "",
    )

"""The stages after training: merge and verification (or, without a merge, the trained weights alone), and publication out of
the cluster.
"""

from __future__ import annotations

from pathlib import Path

from finetune_job.api.status import Artifact
from finetune_job.finding import MAX_TEXT_LENGTH
from finetune_job.layout import OutputLayout
from finetune_job.names import Role
from finetune_job.plan.launch_plan import LaunchPlan
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.children.cpu_jobs import merge_job, publish_job
from finetune_operator.children.frozen_run import FrozenRun
from finetune_operator.decide.finish import finish_succeeded
from finetune_operator.decide.job_state import JobState
from finetune_operator.decide.observed import Observed
from finetune_operator.decide.pass_result import PassResult
from finetune_operator.decide.role_stage import RoleStage
from finetune_operator.decide.stopped import renewed_resources

ARTIFACT_NAME = "published"
_ALGORITHM = "sha256:"


def merge_stage(observed: Observed, result: PassResult, run: FrozenRun) -> bool:
    """One pass while the job is trained and nothing is merged yet. Returns whether the next stage may begin."""
    stage = RoleStage(observed, result, Role.MERGE)
    return stage.drive(
        lambda: merge_job(run, stage.attempt, renewed_resources(observed, Role.MERGE)),
        lambda current: _merge_succeeded(observed, result, current, run.plan),
    )


def _merge_succeeded(observed: Observed, result: PassResult, current: JobState, plan: LaunchPlan) -> bool:
    report = current.report
    message = report.message if report is not None else ""
    if plan.merge.enabled:
        result.condition(ConditionType.MERGED, True, Reason.COMPLETED, message or "Merged and verified.")
    else:
        result.condition(
            ConditionType.MERGED, True, Reason.SKIPPED, message or "Nothing to merge; the trained weights are the result."
        )
    if plan.publish is not None:
        return True
    results = artifacts(plan, report.facts if report is not None else {})
    result.set(artifacts=results)
    result.condition(ConditionType.PUBLISHED, True, Reason.COMPLETED, "The merge wrote the results to where they belong.")
    finish_succeeded(observed, result, f"Results are at {', '.join(artifact.path for artifact in results)}.")
    return False


def artifacts(plan: LaunchPlan, facts: dict[str, str]) -> list[Artifact]:
    """The results on the output claim, with the digests that the container reported."""
    layout = OutputLayout(Path(plan.output.path))
    listed = []
    if plan.has_adapter:
        listed.append(("adapter", layout.adapter, "adapter_sha256"))
    if plan.has_merged:
        listed.append(("merged", layout.merged, "merged_manifest_sha256"))
    if plan.merge.enabled:
        listed.append(("verification", layout.verification, "verification_sha256"))
    if "report_sha256" in facts:  # a trainer image of an earlier release writes none
        listed.append(("report", layout.report, "report_sha256"))
    listed += [
        ("model-card", layout.model_card, "model_card_sha256"),
        ("provenance", layout.provenance, "provenance_sha256"),
        ("checksums", layout.checksums, "checksums_sha256"),
    ]
    return [
        Artifact(name=name, path=f"pvc://{plan.output.claim}/{path}", sha256=facts.get(fact, "")[:64])
        for name, path, fact in listed
    ]


_SHA256_LENGTH = 64


def publish_stage(observed: Observed, result: PassResult, run: FrozenRun) -> bool:
    """One pass while the results are on the workspace and not yet at their destination."""
    stage = RoleStage(observed, result, Role.PUBLISH)
    return stage.drive(
        lambda: publish_job(run, stage.attempt), lambda current: _publish_succeeded(observed, result, current, run.plan)
    )


def _publish_succeeded(observed: Observed, result: PassResult, current: JobState, plan: LaunchPlan) -> bool:
    report = current.report
    facts = report.facts if report is not None else {}
    artifact = published_artifact(plan, facts)
    adapter = facts.get("adapter_address")  # in a repository of its own
    listed = [Artifact(name="adapter", path=adapter[:MAX_TEXT_LENGTH], sha256="")] if adapter else []
    result.set(artifacts=[artifact, *listed])
    result.condition(ConditionType.PUBLISHED, True, Reason.COMPLETED, report.message if report is not None else "")
    finish_succeeded(observed, result, f"Results are at {artifact.path}.")
    return False


def published_artifact(plan: LaunchPlan, facts: dict[str, str]) -> Artifact:
    """The published result: the address that the container reported, and the digest if it is a SHA-256 (a Git commit is not)."""
    destination = plan.publish.destination if plan.publish is not None else ""
    digest = facts.get("digest", "").removeprefix(_ALGORITHM)
    return Artifact(
        name=ARTIFACT_NAME,
        path=(facts.get("address") or destination)[:MAX_TEXT_LENGTH],
        sha256=digest if len(digest) == _SHA256_LENGTH else "",
    )

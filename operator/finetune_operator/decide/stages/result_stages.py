"""The stages after training: merge and verification (without a merge, the trained weights are the result), and publication
outside the cluster.
"""

from __future__ import annotations

from pathlib import Path

from finetune_job.api.status import Artifact
from finetune_job.finding import MAX_TEXT_LENGTH
from finetune_job.layout import OutputLayout
from finetune_job.names import Role
from finetune_job.plan.launch_plan import LaunchPlan
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.children.cpu_jobs import cpu_job
from finetune_operator.children.frozen_run import FrozenRun
from finetune_operator.decide.failures.job_state import JobState
from finetune_operator.decide.pass_result import PassResult
from finetune_operator.decide.seen.observed import Observed
from finetune_operator.decide.stages.finish import finish_succeeded
from finetune_operator.decide.stages.role_stage import RoleStage
from finetune_operator.decide.stages.stopped import renewed_resources

_SHA256_LENGTH = 64


def merge_stage(observed: Observed, result: PassResult, run: FrozenRun) -> bool:
    """Handle one pass while the job is trained but not merged. Returns whether the next stage may begin."""
    stage, plan = RoleStage(observed, result, Role.MERGE), run.plan

    def succeeded(current: JobState) -> bool:
        message, facts = _message_and_facts(current)
        if plan.merge.enabled:
            result.condition(ConditionType.MERGED, True, Reason.COMPLETED, message or "Merged and verified.")
        else:
            message = message or "Nothing to merge; the trained weights are the result."
            result.condition(ConditionType.MERGED, True, Reason.SKIPPED, message)
        if plan.publish is not None:
            return True
        results = artifacts(plan, facts)
        result.set(artifacts=results)
        result.condition(ConditionType.PUBLISHED, True, Reason.COMPLETED, "The merge wrote the results to the output claim.")
        finish_succeeded(observed, result, f"Results are at {', '.join(artifact.path for artifact in results)}.")
        return False

    return stage.drive(lambda: cpu_job(run, Role.MERGE, stage.attempt, renewed_resources(observed, Role.MERGE)), succeeded)


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
    if "report_sha256" in facts:  # trainer images of earlier releases write no report
        listed.append(("report", layout.report, "report_sha256"))
    listed += [
        ("model-card", layout.model_card, "model_card_sha256"),
        ("provenance", layout.provenance, "provenance_sha256"),
        ("checksums", layout.checksums, "checksums_sha256"),
    ]
    return [
        Artifact(name=name, path=f"pvc://{plan.output.claim}/{path}", sha256=facts.get(fact, "")[:_SHA256_LENGTH])
        for name, path, fact in listed
    ]


def publish_stage(observed: Observed, result: PassResult, run: FrozenRun) -> bool:
    """Handle one pass while the results are not yet at their destination. Always returns False, because no stage follows."""
    stage, publish = RoleStage(observed, result, Role.PUBLISH), run.plan.publish

    def succeeded(current: JobState) -> bool:
        message, facts = _message_and_facts(current)
        address = facts.get("address") or (publish.destination if publish is not None else "")
        digest = facts.get("digest", "").removeprefix("sha256:")
        # A Git commit's digest is not SHA-256, so there is none.
        published = Artifact(
            name="published", path=address[:MAX_TEXT_LENGTH], sha256=digest if len(digest) == _SHA256_LENGTH else ""
        )
        adapter = facts.get("adapter_address")  # the adapter has its own repository
        listed = [Artifact(name="adapter", path=adapter[:MAX_TEXT_LENGTH], sha256="")] if adapter else []
        result.set(artifacts=[published, *listed])
        result.condition(ConditionType.PUBLISHED, True, Reason.COMPLETED, message)
        finish_succeeded(observed, result, f"Results are at {published.path}.")
        return False

    return stage.drive(lambda: cpu_job(run, Role.PUBLISH, stage.attempt), succeeded)


def _message_and_facts(current: JobState) -> tuple[str, dict[str, str]]:
    report = current.report
    return ("", {}) if report is None else (report.message, report.facts)

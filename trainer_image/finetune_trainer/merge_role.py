"""The `merge` role: publish the trained adapter, merge it into the base, verify the merged model, quarantine one that fails."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import time
from pathlib import Path

from finetune_job.api.method import MethodType
from finetune_job.failures import Outcome, TerminationReport
from finetune_job.names import Role
from finetune_trainer.context import RunContext
from finetune_trainer.data.batches import PreparedData
from finetune_trainer.errors import CheckpointError, VerificationError
from finetune_trainer.files import TEMPORARY_MARK, file_sha256, publish_directory, sync_file, temporary_beside
from finetune_trainer.merge.run import MergeOptions, merge_adapter
from finetune_trainer.merge.writer import MANIFEST_FILE as MERGED_MANIFEST_FILE
from finetune_trainer.model.load import stored_dtype
from finetune_trainer.train.export import MANIFEST_FILE
from finetune_trainer.verify.gate import Gate, gate_for
from finetune_trainer.verify.report import VerificationReport
from finetune_trainer.verify.run import quarantine, verify_merge

log = logging.getLogger(__name__)


def merge(context: RunContext) -> TerminationReport:
    """Do what the plan's method needs; may be run again after it was killed. Raises VerificationError, MergeError, OSError."""
    plan, trained, output = context.plan, context.workspace.adapter, context.output
    check_trained(trained, context.plan_sha256)
    output.root.mkdir(parents=True, exist_ok=True)
    facts: dict[str, str] = {}
    if plan.method.type is MethodType.FULL:
        publish_copy(trained, output.merged)
        facts["merged_manifest_sha256"] = file_sha256(output.merged / MANIFEST_FILE)
    else:
        publish_copy(trained, output.adapter)
        facts["adapter_sha256"] = file_sha256(output.adapter / MANIFEST_FILE)
        if plan.merge.enabled:
            facts |= _merge_and_verify(context)
    return TerminationReport(role=Role.MERGE, attempt=context.attempt, outcome=Outcome.SUCCEEDED, time=time.time(), facts=facts)


def _merge_and_verify(context: RunContext) -> dict[str, str]:
    plan, output = context.plan, context.output
    # A model under the final name has passed before: this run follows one that was killed after that.
    target = output.merged if output.merged.exists() else output.unverified
    merge_adapter(
        MergeOptions(
            base=context.base_model,
            adapter=output.adapter,
            output=target,
            dtype=plan.merge.dtype.value if plan.merge.dtype else None,
            max_shard_bytes=plan.merge.max_shard_bytes,
        ),
        progress=_log_progress,
    )
    report = verify_merge(
        base=context.base_model,
        adapter=output.adapter,
        merged=target,
        prompts=PreparedData.open(context.workspace.prepared).verification_prompts(plan.merge.num_prompts),
        gate=_gate(context),
        report_path=output.verification,
    )
    log.info("%s", report.text())
    if not report.passed:
        kept = quarantine(target, output.quarantined)
        raise VerificationError(
            f"{report.text()}\nthe merged model is kept as {kept.name}",
            "see verification.json beside it; the adapter itself is published",
        )
    if target != output.merged:
        publish_directory(target, output.merged)
    return {
        "merged_manifest_sha256": file_sha256(output.merged / MERGED_MANIFEST_FILE),
        "verification_sha256": file_sha256(output.verification),
        **_figures(report),
    }


def _figures(report: VerificationReport) -> dict[str, str]:
    if report.logits is None:
        return {}
    return {
        "kl": f"{report.logits.mean_kl:.4g}",
        "top1": f"{report.logits.top1_agreement:.6g}",
        "max_abs": f"{report.logits.max_abs_difference:.4g}",
    }


def _gate(context: RunContext) -> Gate:
    """The thresholds of the element types, with the plan's own in their place."""
    merge = context.plan.merge
    base = str(stored_dtype(context.base_model)).removeprefix("torch.")
    gate = gate_for(base, merge.dtype.value if merge.dtype else base)
    if merge.max_kl_divergence is not None:
        gate = dataclasses.replace(gate, max_mean_kl=merge.max_kl_divergence)
    if merge.min_top1_agreement is not None:
        gate = dataclasses.replace(gate, min_top1_agreement=merge.min_top1_agreement)
    return gate


def check_trained(directory: Path, plan_sha256: str) -> None:
    """The trained result is complete, whole and of this plan. Raises CheckpointError."""
    hint = "delete it and train again: training resumes from the last checkpoint"
    try:
        manifest = json.loads((directory / MANIFEST_FILE).read_bytes())
        if manifest["plan_sha256"] != plan_sha256:
            raise CheckpointError(f"{directory}: was trained by plan {manifest['plan_sha256']}, this is {plan_sha256}", hint)
        for name, entry in manifest["files"].items():
            if file_sha256(directory / name) != entry["sha256"]:
                raise CheckpointError(f"{directory / name}: is not what was trained, its sha256 differs from {MANIFEST_FILE}", hint)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{directory}: {MANIFEST_FILE} or a file it names cannot be read ({error})", hint) from error


def publish_copy(source: Path, final: Path) -> None:
    """Copy a directory of plain files durably and rename it to `final`; an equal one there is kept, another one replaced."""
    for leftover in final.parent.glob(f"{final.name}{TEMPORARY_MARK}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    if (final / MANIFEST_FILE).is_file() and file_sha256(final / MANIFEST_FILE) == file_sha256(source / MANIFEST_FILE):
        return
    temporary = temporary_beside(final)
    temporary.mkdir(parents=True)
    try:
        for path in sorted(source.iterdir()):
            shutil.copyfile(path, temporary / path.name)
            sync_file(temporary / path.name)
        if final.exists():
            shutil.rmtree(final)
        publish_directory(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _log_progress(written: int, total: int) -> None:
    log.debug("merged %d of %d bytes", written, total)

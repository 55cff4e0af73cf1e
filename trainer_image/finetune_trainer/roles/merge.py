"""The `merge` role: keep the trained adapter, merge it into the base, verify the merged model, describe what is released.

A merged model that fails its verification is quarantined. The publish role sends the results.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from finetune_job.api.enumerations import MergeBase
from finetune_job.failures import Outcome, TerminationReport
from finetune_job.layout import MergedPaths, OutputLayout
from finetune_job.names import Role
from finetune_trainer.context import RunContext
from finetune_trainer.data.batches import PreparedData
from finetune_trainer.errors import CheckpointError, TrainerError
from finetune_trainer.files import (
    MANIFEST_FILE,
    FileDigests,
    SpecialFileError,
    file_sha256,
    open_beneath,
    read_own,
    replacing_directory,
    sha256_beneath,
    sync_file,
    write_durably,
)
from finetune_trainer.inspection.report import ModelReport, read_report
from finetune_trainer.inspection.special_files import require_links_inside
from finetune_trainer.merge.merge_adapter import MergeOptions, merge_adapter
from finetune_trainer.merge.quantized_base import packed_in_training
from finetune_trainer.release.adapter_check import check_adapter
from finetune_trainer.release.checksums import remove_checksums
from finetune_trainer.release.facts import RunFacts, run_facts
from finetune_trainer.release.files import CARD, release_layout
from finetune_trainer.release.write import is_complete, release_digests, write_release_files
from finetune_trainer.report.document import Samples
from finetune_trainer.report.page import report_page
from finetune_trainer.report.samples import sample_answers
from finetune_trainer.report.summary import run_summary
from finetune_trainer.report.timeline import read_timeline
from finetune_trainer.verify.gate import VerificationGate
from finetune_trainer.verify.report import VerificationReport
from finetune_trainer.verify.verification import gate_of_merge, verify_and_name, verify_merge
from finetune_trainer.weights.headers import read_checkpoint

log = logging.getLogger(__name__)


def merge(context: RunContext) -> TerminationReport:
    """Keep the adapter, merge, and verify, as the plan says. May be run again after being killed. Raises VerificationError,
    MergeError, OSError.

    The trained adapter is renamed into place before the merge begins. SHA256SUMS is written last, so if it exists, the results
    are complete.
    """
    plan, trained, output = context.plan, context.workspace.adapter, context.output
    require_links_inside(context.base_model, context.base_model_root)
    step = check_trained(trained, context.plan_sha256)
    serving = check_adapter(trained, plan, context.base_model) if plan.method.trains_adapter else None
    output.root.mkdir(parents=True, exist_ok=True)
    layout, digest = release_layout(plan), file_sha256(trained / MANIFEST_FILE)
    # A merged model is renamed into place only after its verification, so if one exists, its digest is the expected one.
    expected = {output.adapter: digest} if layout.has_adapter else {}
    expected |= {output.merged: _merged_digest(context, digest)} if layout.has_merged else {}
    digests = {f"{path.name}/{MANIFEST_FILE}": sha256 for path, sha256 in expected.items()}
    was_complete = is_complete(output, layout, context.plan_sha256, digests)
    if not was_complete:
        remove_checksums(output)
    facts: dict[str, str] = {}
    if layout.has_adapter:
        publish_copy(trained, output.adapter)
        facts["adapter_sha256"] = digest
    elif not plan.method.trains_adapter:
        publish_copy(trained, output.merged)
        facts["merged_manifest_sha256"] = digest
    verification, preflight = None, read_report(context.workspace.model_report)

    def describe(verification: VerificationReport | None, samples: Samples) -> RunFacts:
        """Write the report of the run, as a page and as data. Raises OSError, TrainerError."""
        run = run_facts(context, step, preflight, verification, serving)
        summary = run_summary(run, read_timeline(context.workspace, preflight), samples)
        write_durably(output.report_data, summary.json_text().encode())
        write_durably(output.report, report_page(run, summary).encode())
        return run

    if plan.merge.enabled:
        verification = _merge_and_verify(context, preflight, describe, was_complete=was_complete)
        facts |= {
            "merged_manifest_sha256": file_sha256(output.merged / MANIFEST_FILE),
            "verification_sha256": file_sha256(output.verification),
        }
        if (logits := verification.logits) is not None:
            facts |= {
                "kl": f"{logits.mean_kl:.4g}",
                "top1": f"{logits.top1_agreement:.6g}",
                "max_abs": f"{logits.max_abs_difference:.4g}",
            }
    if serving is not None:
        facts["vllm"] = serving.text()
    # Results that are complete stay as they are, byte for byte; a new report would differ in its timings.
    if was_complete:
        facts |= release_digests(output)
    else:
        facts |= write_release_files(output, describe(verification, sample_answers(context)))
    return TerminationReport(role=Role.MERGE, attempt=context.attempt, outcome=Outcome.SUCCEEDED, time=time.time(), facts=facts)


def _merged_digest(context: RunContext, trained: str) -> str:
    """Return the digest of the merged model's final manifest; empty if the model has not been merged yet."""
    if not context.plan.method.trains_adapter:
        return trained
    manifest = context.output.merged / MANIFEST_FILE
    return file_sha256(manifest) if manifest.is_file() else ""


def _merge_and_verify(
    context: RunContext,
    preflight: ModelReport | None,
    describe: Callable[[VerificationReport, Samples], object],
    *,
    was_complete: bool,
) -> VerificationReport:
    """Merge, verify, and rename the merged model into place. describe: writes the run's report if the model fails.

    Raises VerificationError, MergeError, OSError.
    """
    plan, output, trained = context.plan, context.output, context.workspace.adapter
    quantization, packed = plan.method.quantization, None
    # What an 8-bit base computed in training cannot be reproduced, so the merged model is not compared with it.
    if quantization is not None and (quantization.bits == 4 or plan.merge.base is not MergeBase.ORIGINAL):
        packed = packed_in_training(plan, context.base_model)
    # Complete results keep their report. A later one would differ in its timings, so it stays on the workspace.
    paths = output.merged_paths(context.workspace.root if was_complete else None)
    digests = FileDigests()
    # Hash while the merge waits for the disk.
    digests.begin(context.base_model / name for name in read_checkpoint(context.base_model).file_bytes)
    merge_adapter(
        MergeOptions(
            base=context.base_model,
            adapters=(trained,),
            output=paths.current,
            dtype=plan.merge.dtype.value if plan.merge.dtype else None,
            max_shard_bytes=plan.merge.max_shard_bytes,
            quantization=packed if plan.merge.base is MergeBase.DEQUANTIZED else None,
            base_root=context.base_model_root,
        ),
        progress=lambda written, total: log.debug("merged %d of %d bytes", written, total),
    )

    def withdraw(failed: VerificationReport) -> None:
        _withdraw(output, paths)
        try:
            describe(failed, Samples(reason="the merged model failed its verification"))
        except (OSError, TrainerError) as error:  # users must see the verdict, not this error
            log.warning("%s: there is no report of the run: %s", output.report, error)

    verify = partial(
        verify_merge,
        base=context.base_model,
        adapters=[trained],
        prompts=PreparedData.open(context.workspace.prepared).verification_prompts(plan.merge.num_prompts),
        gate=_gate(context),
        quantization=packed,
        merged_onto=plan.merge.base,
        base_sha256=None if preflight is None else preflight.model_files,
        allow_remote_code=plan.model.allow_remote_code,
        digests=digests,
    )
    return verify_and_name(paths, verify, withdraw)


def _withdraw(output: OutputLayout, failed: MergedPaths) -> None:
    """Mark the results as incomplete, and leave only the reports of the failed verification to describe them."""
    remove_checksums(output)
    for described in (output.report, output.report_data, output.model_card, output.provenance, output.adapter / CARD):
        described.unlink(missing_ok=True)
    shown = output.merged_paths()
    for written, kept in ((failed.report, shown.report), (failed.page, shown.page)):
        if written != kept:
            write_durably(kept, written.read_bytes())


def _gate(context: RunContext) -> VerificationGate:
    """Return the thresholds for the element types, or the plan's own where it sets them."""
    merge = context.plan.merge
    gate = gate_of_merge(context.base_model, merge.dtype.value if merge.dtype else None)
    if merge.max_kl_divergence is not None:
        gate = dataclasses.replace(gate, max_mean_kl=merge.max_kl_divergence)
    if merge.min_top1_agreement is not None:
        # A share that a user asks for applies exactly: no positions are excused.
        gate = dataclasses.replace(gate, min_top1_agreement=merge.min_top1_agreement, max_excused=0)
    return gate


def check_trained(directory: Path, plan_sha256: str) -> int:
    """Check that the trained result is complete, undamaged and from this plan; returns its step. Raises CheckpointError."""
    hint = "delete it and train again: training resumes from the last checkpoint"
    try:
        manifest = json.loads(read_own(directory / MANIFEST_FILE))
        if manifest["plan_sha256"] != plan_sha256:
            raise CheckpointError(f"{directory} was trained by plan {manifest['plan_sha256']}, not by {plan_sha256}", hint)
        for name, entry in manifest["files"].items():
            if sha256_beneath(directory, name) != entry["sha256"]:
                raise CheckpointError(
                    f"{directory / name} is not what was trained: its sha256 differs from {MANIFEST_FILE}", hint
                )
        return int(manifest["step"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{directory}: {MANIFEST_FILE} or a file it names cannot be read ({error})", hint) from error


def publish_copy(source: Path, final: Path) -> None:
    """Copy a directory of plain files durably to `final`: an equal directory there is kept, a different one is replaced.

    Raises CheckpointError for a link, which training does not write, and OSError.
    """
    if (final / MANIFEST_FILE).is_file() and file_sha256(final / MANIFEST_FILE) == file_sha256(source / MANIFEST_FILE):
        return
    with replacing_directory(final) as temporary:
        for path in sorted(source.rglob("*")):
            name = path.relative_to(source)
            if path.is_dir() and not path.is_symlink():
                (temporary / name).mkdir()
                continue
            try:
                with open_beneath(source, str(name)) as file, (temporary / name).open("wb") as copy:
                    shutil.copyfileobj(file, copy, 1 << 20)
            except SpecialFileError as error:
                raise CheckpointError(f"{path}: {error.strerror}", "delete it: training wrote plain files alone") from error
            sync_file(temporary / name)
        for path in temporary.rglob("*/"):
            sync_file(path)

"""The order of preflight: storage, model files, tokenizer, structure, data, and whether they fit; then data and report are
written.

The rehearsal begins as soon as the structure is known, and runs while the data is prepared. Every possible check runs, so that a
user sees all findings at once; a check is left out only if what it looks at does not exist. A refusal leaves only reports on the
workspace. Called by `python -m finetune_trainer preflight`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from finetune_job.catalogue.book import rehearsal_required
from finetune_job.failures import FailureClass, Outcome, TerminationReport
from finetune_job.finding import Finding
from finetune_job.names import Role
from finetune_job.plan.run_plan import Choice
from finetune_job.rules.rule import changes_text, format_value
from finetune_memory.batches import choose_resharding
from finetune_trainer.context import RunContext
from finetune_trainer.data.prepare import Preparation
from finetune_trainer.data.shards import TRAIN
from finetune_trainer.files import write_durably
from finetune_trainer.inspection.model_files import file_digests
from finetune_trainer.inspection.report import SKIPPED, ModelReport, RehearsalReport, Verdict
from finetune_trainer.preflight.added_tokens import add_tokens, check_rows, check_use, chosen_rows
from finetune_trainer.preflight.checks import (
    CheckStep,
    JobInspection,
    base_is_made,
    expressions_compile,
    files_are_whole,
    files_can_be_opened,
    has_added_tokens,
    has_structure,
    has_tokenizer,
    has_training_data,
    nothing_refused,
    run_steps,
    storage_is_ready,
    trains_input_rows_alone,
)
from finetune_trainer.preflight.expressions import check_expressions
from finetune_trainer.preflight.fit import check_fit
from finetune_trainer.preflight.job_steps import (
    check_base_name,
    check_data,
    check_files,
    check_memory,
    check_room,
    check_start,
    check_storage,
    check_tokenizer,
    check_trackers,
)
from finetune_trainer.preflight.model_process import check_model, computed_first_values
from finetune_trainer.preflight.token_rows import check_token_rows, check_trained_rows
from finetune_trainer.processes.start import torch_is_here
from finetune_trainer.rehearsal.verdicts import find_verdict, keep_verdict, rehearsal_key
from finetune_trainer.roles.rehearse import ModelProcess
from finetune_trainer.train.policy import total_steps

log = logging.getLogger(__name__)
_CHOICES = TypeAdapter(tuple[Choice, ...])


@dataclass
class PreflightInspection(JobInspection):
    """An inspection with the process that has imported torch."""

    process: ModelProcess | None = None
    """None before it is needed, and after it has ended."""
    key: str = ""
    """Key of the rehearsal, under which its verdict may be kept for other jobs."""

    def begin_process(self) -> None:
        """Start the process early, because its imports take longer than everything before its first use."""
        if not torch_is_here():
            self.process = self.until_done.enter_context(ModelProcess(self.context))


def check_added_tokens(seen: PreflightInspection) -> Iterable[Finding]:
    """Make the base with the added tokens, then start the process, which is given one directory as usual."""
    findings = [*add_tokens(seen)]
    if seen.added is not None:
        seen.begin_process()
    return findings


def check_structure(seen: PreflightInspection) -> Iterable[Finding]:
    """Fill in `structure`, in a process of its own unless this one has already imported torch."""
    if seen.process is None:
        seen.structure, findings = check_model(seen.plan, seen.context.base_model)
    else:
        seen.structure, findings = seen.process.check()
    return findings


def begin_rehearsal(seen: PreflightInspection) -> Iterable[Finding]:
    """Let the process rehearse the job while the data is prepared, or end it: it holds as much memory as all the rest.

    A refusal after this ends the rehearsal as if it had not begun.
    """
    if seen.plan.rehearses and seen.structure is not None and nothing_refused(seen):
        files = seen.known_files
        seen.key = rehearsal_key(seen.plan, seen.context.base_model, files.digest, files.weight_bytes)
        # Anyone who can write to the claim could plant a verdict.
        kept = None if _requires_rehearsal(seen) else find_verdict(seen.context, seen.key)
        if kept is None:
            seen.process = seen.process or seen.until_done.enter_context(ModelProcess(replace(seen.context, plan=seen.plan)))
            seen.process.begin_rehearsal()
            return ()
        log.info("this rehearsal has passed on this claim before, %s", kept.kept_since)
        seen.rehearsal = kept
    if seen.process is not None:
        seen.process.close()
        seen.process = None
    return ()


def is_rehearsing(seen: PreflightInspection) -> bool:
    return seen.process is not None and seen.process.is_rehearsing


def rehearse(seen: PreflightInspection) -> Iterable[Finding]:
    """Wait for the rehearsal and fill in `rehearsal`."""
    if seen.process is not None:
        seen.rehearsal = seen.process.rehearsal()
        keep_verdict(seen.context, seen.key, seen.rehearsal)
    if _requires_rehearsal(seen):
        # The findings' changes skip the rehearsal, which would be refused.
        return [
            finding.model_copy(update={"fix": "", "changes": ()}) if finding.changes else finding
            for finding in seen.rehearsal.findings
        ]
    return seen.rehearsal.findings


def require_rehearsal(seen: PreflightInspection) -> Iterable[Finding]:
    """If the profile requires a rehearsal, only one that passed will do."""
    placement = seen.plan.placement
    if placement is None or not _requires_rehearsal(seen) or seen.rehearsal.verdict is Verdict.PASSED:
        return ()
    return (rehearsal_required(placement.profile, seen.rehearsal.verdict.value),)


def _requires_rehearsal(seen: PreflightInspection) -> bool:
    return seen.plan.placement is not None and seen.plan.placement.requires_rehearsal


CHECKS: tuple[CheckStep[PreflightInspection], ...] = (
    CheckStep(check_storage),
    CheckStep(check_trackers),
    CheckStep(check_files),
    CheckStep(check_added_tokens, (files_are_whole, storage_is_ready)),
    CheckStep(check_base_name, (files_can_be_opened,)),
    CheckStep(check_tokenizer, (files_can_be_opened,)),
    CheckStep(check_expressions),
    CheckStep(check_structure, (files_are_whole, base_is_made, expressions_compile)),
    CheckStep(begin_rehearsal),
    # The last check that forks this process, since reading tables of data starts threads.
    CheckStep(check_token_rows, (has_structure, has_tokenizer)),
    CheckStep(check_data),
    CheckStep(check_fit),
    CheckStep(check_rows, (has_structure, has_added_tokens)),
    CheckStep(check_use, (has_added_tokens, has_training_data)),
    CheckStep(check_trained_rows, (trains_input_rows_alone, has_training_data, storage_is_ready)),
    CheckStep(check_start, (has_structure,)),
    CheckStep(check_room, (has_structure, storage_is_ready)),
    CheckStep(check_memory, (has_structure,)),
    CheckStep(rehearse, (is_rehearsing, nothing_refused)),
    CheckStep(require_rehearsal, (nothing_refused,)),
)
"""Checks in the order in which findings are shown; those of the model are listed in preflight/model_checks.py."""


def run(context: RunContext) -> TerminationReport:
    """Check everything and prepare the data. Raises OSError if the workspace cannot be written."""
    seen = PreflightInspection(context)
    with seen.until_done:
        if not context.plan.model.added_tokens:
            seen.begin_process()
        run_steps(CHECKS, seen)
        for finding in seen.findings:
            log.log(logging.ERROR if finding.severity == "error" else logging.WARNING, "%s: %s", finding.rule, finding.message)
            if finding.changes:
                log.info("%s: cleared by %s", finding.rule, changes_text(finding.changes))
        if seen.structure is None or not nothing_refused(seen):
            return _refused(seen)
        resharding = _resharding(seen)
        for chosen in (*seen.structure.batches, *(() if resharding is None else (resharding,))):
            log.info("%s: %s, because %s", chosen.field, format_value(chosen.value), chosen.reason)
        lora = seen.plan.method.lora
        # Written last before the data, so that a refusal leaves nothing behind.
        first_values = computed_first_values(seen.context) if lora is not None and lora.starts_from_base else None
        data_hash = seen.known_data.publish()
    return _accepted(seen, _model_report(seen, data_hash), first_values)


def _record_lengths(data: Preparation) -> dict[int, int]:
    counts: dict[int, int] = {}
    for facts in data.datasets:
        if facts.split == TRAIN:
            for bound, count in facts.lengths.items():
                counts[bound] = counts.get(bound, 0) + count
    return dict(sorted(counts.items()))


def _model_report(seen: JobInspection, data_hash: str) -> ModelReport:
    plan, context, structure, data = seen.plan, seen.context, seen.known_structure, seen.known_data
    training, train = plan.training, data.splits[TRAIN]
    return ModelReport(
        plan_sha256=context.plan_sha256,
        model_digest=seen.known_files.digest,
        model_files=file_digests(context.base_model) if plan.merge.enabled else {},
        data_hash=data_hash,
        wrap_classes=structure.wrap_classes,
        fsdp_units=structure.fsdp_units,
        dtypes=structure.dtypes,
        trainable=structure.trainable,
        saved_tensors=structure.saved_tensors,
        train_sequences=train.num_sequences,
        supervised_tokens=train.num_supervised_tokens,
        record_lengths=_record_lengths(data),
        total_steps=total_steps(training.epochs, training.max_steps, train.num_sequences, training.global_batch_size),
        memory=dict(seen.memory.terms) if seen.memory is not None else {},
        resharding=_resharding(seen),
        batches=(*structure.batches, *chosen_rows(seen)),
        rehearsal=seen.rehearsal,
        warnings=tuple(seen.findings),
    )


def _resharding(seen: JobInspection) -> Choice | None:
    return choose_resharding(seen.plan, None, None) if seen.memory is None else seen.memory.resharding


def _accepted(seen: JobInspection, report: ModelReport, first_values: str | None) -> TerminationReport:
    write_durably(seen.context.workspace.model_report, report.model_dump_json(indent=1).encode())
    return TerminationReport(
        role=Role.PREFLIGHT,
        attempt=seen.context.attempt,
        outcome=Outcome.SUCCEEDED,
        message=(
            f"{report.train_sequences} training sequences, {report.total_steps} steps, {report.trainable_parameters} trained "
            "values"
        ),
        time=time.time(),
        findings=list(report.warnings),
        findings_total=len(report.warnings),
        facts={
            "data_hash": report.data_hash,
            "model_digest": report.model_digest,
            "train_sequences": str(report.train_sequences),
            "supervised_tokens": str(report.supervised_tokens),
            "trainable_parameters": str(report.trainable_parameters),
            "total_steps": str(report.total_steps),
            "wrap_classes": ",".join(report.wrap_classes),
            **_rehearsal_facts(seen.rehearsal),
            **({"first_values_sha256": first_values} if first_values is not None else {}),
            **(seen.memory.facts if seen.memory is not None else {}),
            **({"resharding": report.resharding.model_dump_json()} if report.resharding is not None else {}),
            **({"batches": _CHOICES.dump_json(report.batches).decode()} if report.batches else {}),
        },
    )


def _refused(seen: JobInspection) -> TerminationReport:
    errors = [finding for finding in seen.findings if finding.severity == "error"]
    first = errors[0]
    return TerminationReport(
        role=Role.PREFLIGHT,
        attempt=seen.context.attempt,
        outcome=Outcome.REFUSED,
        failure=_failure(first),
        message=f"{len(errors)} error{'s' if len(errors) > 1 else ''}; first: {first.field}: {first.message}",
        hint=first.fix,
        time=time.time(),
        findings=[*errors, *(finding for finding in seen.findings if finding.severity != "error")],
        findings_total=len(seen.findings),
        facts={
            # If an earlier check failed, the rehearsal was not skipped because the job asked for it.
            **(_rehearsal_facts(seen.rehearsal) if seen.rehearsal is not SKIPPED or not seen.plan.rehearses else {}),
            **(seen.memory.facts if seen.memory is not None else {}),
        },
    )


def _rehearsal_facts(rehearsal: RehearsalReport) -> dict[str, str]:
    facts = {"rehearsal": rehearsal.verdict.value, "rehearsal_seconds": str(rehearsal.seconds)}
    return facts | ({"rehearsal_kept_since": rehearsal.kept_since} if rehearsal.kept_since else {})


def _failure(finding: Finding) -> FailureClass:
    if finding.field.startswith("spec.data."):
        return FailureClass.USER_DATA
    if finding.field.startswith("spec.model."):
        return FailureClass.USER_MODEL
    return FailureClass.USER_CONFIG

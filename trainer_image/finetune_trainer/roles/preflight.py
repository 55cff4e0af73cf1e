"""The preflight role: inspect files, model and data of a job, check them, and write the prepared data and a report.

The rehearsal begins as soon as the structure is known, and runs while the data is prepared. Every possible check runs, so that a
user sees all findings at once; a check is left out only if its subject does not exist. A refusal leaves only reports on the
workspace. Called by `python -m finetune_trainer preflight`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from pydantic import TypeAdapter

from finetune_job.catalogue.book import rehearsal_required
from finetune_job.failures import FailureClass, Outcome, TerminationReport
from finetune_job.finding import Finding
from finetune_job.names import Role
from finetune_job.plan.run_plan import Choice
from finetune_job.rules.rule import changes_text, format_value
from finetune_memory.choices import choose_resharding
from finetune_trainer.added_tokens import remove_made
from finetune_trainer.context import RunContext
from finetune_trainer.data.shards import TRAIN
from finetune_trainer.data.steps import total_steps
from finetune_trainer.files import write_durably
from finetune_trainer.inspection.model_files import file_digests
from finetune_trainer.inspection.report import SKIPPED, ModelReport, RehearsalReport, Verdict
from finetune_trainer.preflight.added_tokens import check_rows, check_use, chosen_rows
from finetune_trainer.preflight.fit import check_fit
from finetune_trainer.preflight.inspection import Inspection, is_refused
from finetune_trainer.preflight.job_steps import check_finite, check_memory, check_room, check_start, inspect_data, inspect_files
from finetune_trainer.preflight.model_process import check_model, computed_first_values, finish_check
from finetune_trainer.preflight.token_rows import check_token_rows, check_trained_rows
from finetune_trainer.rehearsal.verdicts import find_verdict, keep_verdict, rehearsal_key
from finetune_trainer.roles.rehearse import start_rehearsal

log = logging.getLogger(__name__)
_CHOICES = TypeAdapter(tuple[Choice, ...])
CHECKS: tuple[Callable[[Inspection], Iterable[Finding]], ...] = (
    check_fit,
    check_rows,
    check_use,
    check_trained_rows,
    check_start,
    check_room,
    check_memory,
    check_finite,
)
"""Checks of the inspection, in the order in which findings are shown. preflight/model_checks.py lists the model's checks."""


def run(context: RunContext) -> TerminationReport:
    """Check everything and prepare the data. Raises OSError if the workspace cannot be written."""
    with ExitStack() as until_done:
        seen = inspect_model(inspect_files(context, until_done))
        rehearsal = _begin_rehearsal(seen, until_done)
        seen = inspect_data(seen, until_done)
        findings = [*seen.findings, *(finding for check in CHECKS for finding in check(seen))]
        if not is_refused(findings):
            if not isinstance(rehearsal, RehearsalReport):
                rehearsal = rehearsal()
            findings += _rehearsal_findings(seen, rehearsal)
        for finding in findings:
            log.log(logging.ERROR if finding.severity == "error" else logging.WARNING, "%s: %s", finding.rule, finding.message)
            if finding.changes:
                log.info("%s: cleared by %s", finding.rule, changes_text(finding.changes))
        if seen.structure is None or seen.data is None or is_refused(findings):
            # A rehearsal that is still running reads the base that a refusal removes, so it is stopped first.
            until_done.close()
            return _refused(seen, findings, rehearsal if isinstance(rehearsal, RehearsalReport) else SKIPPED)
        resharding = choose_resharding(seen.plan, None, None) if seen.memory is None else seen.memory.resharding
        for chosen in (*seen.structure.batches, *(() if resharding is None else (resharding,))):
            log.info("%s: %s, because %s", chosen.field, format_value(chosen.value), chosen.reason)
        lora = seen.plan.method.lora
        # Write these only now, just before the data, so that a refusal leaves nothing behind.
        first_values = computed_first_values(seen.context) if lora is not None and lora.starts_from_base else None
        data_hash = seen.data.publish()
    train, training = seen.data.splits[TRAIN], seen.plan.training
    lengths: Counter[int] = Counter()
    for facts in seen.data.datasets:
        if facts.split == TRAIN:
            lengths.update(facts.lengths)
    report = ModelReport(
        plan_sha256=context.plan_sha256,
        model_digest=seen.files.digest,
        model_files=file_digests(context.base_model) if seen.plan.merge.enabled else {},
        data_hash=data_hash,
        wrap_classes=seen.structure.wrap_classes,
        fsdp_units=seen.structure.fsdp_units,
        dtypes=seen.structure.dtypes,
        trainable=seen.structure.trainable,
        saved_tensors=seen.structure.saved_tensors,
        train_sequences=train.num_sequences,
        supervised_tokens=train.num_supervised_tokens,
        record_lengths=dict(sorted(lengths.items())),
        total_steps=total_steps(training.epochs, training.max_steps, train.num_sequences, training.global_batch_size),
        memory=dict(seen.memory.terms) if seen.memory is not None else {},
        resharding=resharding,
        batches=(*seen.structure.batches, *chosen_rows(seen)),
        rehearsal=rehearsal,
        warnings=tuple(findings),
    )
    write_durably(context.workspace.model_report, report.model_dump_json(indent=1).encode())
    return _accepted(seen, report, first_values)


def inspect_model(seen: Inspection) -> Inspection:
    """Build the model without its weights, in the process started for it or in this one, and check the rows of its tokens."""
    if not seen.can_be_built:
        return seen
    if seen.model_process is None:
        structure, findings = check_model(seen.plan, seen.context.base_model)
    else:
        structure, findings = finish_check(seen.model_process, seen.context.base_model)
    seen = replace(seen, structure=structure, findings=(*seen.findings, *findings))
    # This is the last check that may fork this process: reading tables of data, which comes later, starts threads.
    return replace(seen, findings=(*seen.findings, *check_token_rows(seen)))


def _begin_rehearsal(seen: Inspection, until_done: ExitStack) -> RehearsalReport | Callable[[], RehearsalReport]:
    """Start the rehearsal, which runs while the data is prepared; returns the function that waits for its report.

    Returns a report if there is nothing to wait for. A later refusal stops the rehearsal as if it had not begun.
    """
    if not seen.plan.rehearses or seen.structure is None or is_refused(seen.findings):
        return SKIPPED
    key = rehearsal_key(seen.plan, seen.context.base_model, seen.files.digest, seen.files.weight_bytes)
    # Anyone who can write to the claim could forge a verdict.
    kept = None if _requires_rehearsal(seen) else find_verdict(seen.context, key)
    if kept is not None:
        log.info("this rehearsal has passed on this claim before, %s", kept.kept_since)
        return kept
    wait = start_rehearsal(replace(seen.context, plan=seen.plan), until_done)

    def finish() -> RehearsalReport:
        report = wait()
        keep_verdict(seen.context, key, report)
        return report

    return finish


def _rehearsal_findings(seen: Inspection, rehearsal: RehearsalReport) -> list[Finding]:
    """Return the rehearsal's own findings, and a refusal if the profile requires a passed rehearsal and this one did not pass."""
    placement = seen.plan.placement
    if placement is None or not _requires_rehearsal(seen):
        return list(rehearsal.findings)
    # The findings propose to skip the rehearsal, which the profile forbids, so the proposals are left out.
    findings = [
        finding.model_copy(update={"fix": "", "changes": ()}) if finding.changes else finding for finding in rehearsal.findings
    ]
    if rehearsal.verdict is not Verdict.PASSED and not is_refused(findings):
        findings.append(rehearsal_required(placement.profile, rehearsal.verdict.value))
    return findings


def _requires_rehearsal(seen: Inspection) -> bool:
    return seen.plan.placement is not None and seen.plan.placement.requires_rehearsal


def _accepted(seen: Inspection, report: ModelReport, first_values: str | None) -> TerminationReport:
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
            **_rehearsal_facts(report.rehearsal),
            **({"first_values_sha256": first_values} if first_values is not None else {}),
            **(seen.memory.facts if seen.memory is not None else {}),
            **({"resharding": report.resharding.model_dump_json()} if report.resharding is not None else {}),
            **({"batches": _CHOICES.dump_json(report.batches).decode()} if report.batches else {}),
        },
    )


def _refused(seen: Inspection, findings: Sequence[Finding], rehearsal: RehearsalReport) -> TerminationReport:
    if seen.added is not None:
        try:
            remove_made(seen.context.workspace.added_tokens, seen.context.workspace.base_with_tokens)
        except OSError:  # the reason for the refusal is more important
            log.exception("%s could not be removed", seen.context.workspace.base_with_tokens)
    errors = [finding for finding in findings if finding.severity == "error"]
    first = errors[0]
    failure = FailureClass.USER_CONFIG
    for prefix, kind in (("spec.data.", FailureClass.USER_DATA), ("spec.model.", FailureClass.USER_MODEL)):
        if first.field.startswith(prefix):
            failure = kind
    return TerminationReport(
        role=Role.PREFLIGHT,
        attempt=seen.context.attempt,
        outcome=Outcome.REFUSED,
        failure=failure,
        message=f"{len(errors)} error{'s' if len(errors) > 1 else ''}; first: {first.field}: {first.message}",
        hint=first.fix,
        time=time.time(),
        findings=[*errors, *(finding for finding in findings if finding.severity != "error")],
        findings_total=len(findings),
        facts={
            # If an earlier check failed, that is why the rehearsal did not run; the job has not asked to skip it.
            **(_rehearsal_facts(rehearsal) if rehearsal is not SKIPPED or not seen.plan.rehearses else {}),
            **(seen.memory.facts if seen.memory is not None else {}),
        },
    )


def _rehearsal_facts(rehearsal: RehearsalReport) -> dict[str, str]:
    facts = {"rehearsal": rehearsal.verdict.value, "rehearsal_seconds": str(rehearsal.seconds)}
    return facts | ({"rehearsal_kept_since": rehearsal.kept_since} if rehearsal.kept_since else {})

"""The order of preflight: storage, model files, tokenizer, structure, data, and whether they fit; then data and report are written.

Every check runs that can, so that a user sees all findings at once; a check is left out only where what it looks at does not exist.
A refusal leaves nothing on the workspace but reports. Called by `python -m finetune_trainer preflight`.
"""

from __future__ import annotations

import logging
import math
import time

from finetune_job.failures import FailureClass, Outcome, ReportedFinding, TerminationReport
from finetune_job.names import Role
from finetune_job.plan.element_types import DTYPE_BYTES
from finetune_job.plan.run_plan import RunPlan
from finetune_job.rules.changes import changes_text
from finetune_job.rules.rule import Finding
from finetune_memory.optimizers import FORMS
from finetune_trainer.context import RunContext
from finetune_trainer.data.prepare import Preparation, prepare
from finetune_trainer.data.shards import TRAIN
from finetune_trainer.data.tokenizer import checked_tokenizer
from finetune_trainer.files import write_durably
from finetune_trainer.inspection.model_files import ModelFiles, file_digests, inspect_model_files
from finetune_trainer.inspection.model_structure import ModelStructure
from finetune_trainer.inspection.rehearsal_report import SKIPPED, RehearsalReport
from finetune_trainer.inspection.report import ModelReport
from finetune_trainer.inspection.special_files import UNUSABLE_FILE
from finetune_trainer.observe.trackers import unknown_trackers
from finetune_trainer.preflight.expressions import check_expressions
from finetune_trainer.preflight.fit import check_fit
from finetune_trainer.preflight.memory import MemoryNeed, memory_need
from finetune_trainer.preflight.model_process import check_model
from finetune_trainer.preflight.rows_read import check_rows_read
from finetune_trainer.preflight.storage import check_room, check_vacant, check_writable
from finetune_trainer.preflight.token_rows import check_token_rows
from finetune_trainer.roles.rehearse import rehearse_in_own_process
from finetune_trainer.train.schedule import total_steps

log = logging.getLogger(__name__)

BYTES_PER_VALUE = 4
"""Of a trained value and of its optimizer state: float32 at most."""


def run(context: RunContext) -> TerminationReport:
    """Check everything and prepare the data. Raises OSError where the workspace fails while it is written."""
    plan = context.plan
    findings = _storage(context)
    storage_is_ready = not findings
    unknown = unknown_trackers(plan)
    findings += [unknown] if unknown else []
    location = plan.model.location
    files = inspect_model_files(context.base_model, f"pvc://{location.claim}/{location.path}")
    findings += files.findings
    tokenizer, structure = None, None
    if context.base_model.is_dir() and not any(finding.rule == UNUSABLE_FILE for finding in files.findings):
        tokenizer, found = checked_tokenizer(plan, context.base_model)
        findings += found
    malformed = check_expressions(plan.method)
    findings += malformed
    # PEFT compiles them, too, while the model is looked at.
    if files.digest and not malformed:
        structure, found = check_model(plan, context.base_model)
        findings += found
    with prepare(
        plan.data,
        context.claims_root,
        context.base_model,
        tokenizer if storage_is_ready else None,
        context.workspace.prepared,
        allow_remote_code=plan.model.allow_remote_code,
    ) as data:
        findings += data.findings
        findings += check_fit(
            plan,
            data.splits,
            structure.vocabulary_size if structure else None,
            len(tokenizer) if tokenizer is not None else 0,
            structure.max_positions if structure else None,
            max_row=structure.max_row if structure else None,
        )
        if structure is not None and tokenizer is not None:
            findings += check_token_rows(plan, tokenizer, structure, context.base_model)
        if structure is not None and structure.trains_input_rows_alone and TRAIN in data.splits and storage_is_ready:
            findings += check_rows_read(plan, data.readable_at(context.workspace.prepared), structure.padding_row)
        if structure is not None and storage_is_ready:
            findings += _room(context, structure, files)
        memory = memory_need(plan, structure, data.splits) if structure is not None else None
        if memory is not None and memory.finding is not None:
            findings.append(memory.finding)
        rehearsal = SKIPPED
        if structure is not None and not _errors(findings) and context.plan.rehearses:
            rehearsal = rehearse_in_own_process(context)
            findings += rehearsal.findings
        for finding in findings:
            log.log(logging.ERROR if finding.severity == "error" else logging.WARNING, "%s: %s", finding.rule, finding.message)
            if finding.changes:
                log.info("%s: cleared by %s", finding.rule, changes_text(finding.changes))
        if structure is None or _errors(findings):
            return _refused(context, findings, memory)
        data_hash = data.publish()
    report = _model_report(
        context,
        files=files,
        structure=structure,
        data=data,
        data_hash=data_hash,
        memory=memory,
        rehearsal=rehearsal,
        findings=findings,
    )
    return _accepted(context, report, memory)


def _storage(context: RunContext) -> list[Finding]:
    found = [
        check_writable("spec.workspace", context.plan.workspace, context.claims_root),
        check_writable("spec.output.destination", context.plan.output, context.claims_root),
    ]
    if not context.workspace.adapter.exists():
        # Once this job has trained, what stands at the output is its own.
        results = (context.output.adapter, context.output.merged)
        found.append(check_vacant("spec.output.destination", context.plan.output, results))
    return [finding for finding in found if finding is not None]


def _room(context: RunContext, structure: ModelStructure, files: ModelFiles) -> list[Finding]:
    """Room for what this job has still to write."""
    plan = context.plan
    trained = sum(math.prod(shape) for shape in structure.trainable.values())
    found = []
    if not context.workspace.checkpoints.exists():
        # One checkpoint more than is kept, because the newest is complete before the oldest goes; the best; the trained weights.
        checkpoints = plan.checkpoint.keep + 1 + plan.evaluation.load_best_model_at_end
        values = checkpoints * (1 + len(FORMS[plan.training.optimizer].tensors)) + 1
        needed = values * trained * BYTES_PER_VALUE
        found.append(check_room("spec.workspace", plan.workspace, context.claims_root, needed, "checkpoints and trained weights"))
    if not context.workspace.adapter.exists():
        needed = _merged_bytes(plan, structure, files) + trained * BYTES_PER_VALUE
        found.append(check_room("spec.output.destination", plan.output, context.claims_root, needed, "the results"))
    return [finding for finding in found if finding is not None]


def _merged_bytes(plan: RunPlan, structure: ModelStructure, files: ModelFiles) -> int:
    """Of the merged model's weights, in the element type that it is to have."""
    if not plan.merge.enabled:
        return 0
    merged = plan.merge.dtype.value if plan.merge.dtype else structure.stored_dtype
    return files.weight_bytes * DTYPE_BYTES[merged] // DTYPE_BYTES[structure.stored_dtype]


def _record_lengths(data: Preparation) -> dict[int, int]:
    counts: dict[int, int] = {}
    for facts in data.datasets:
        if facts.split == TRAIN:
            for bound, count in facts.lengths.items():
                counts[bound] = counts.get(bound, 0) + count
    return dict(sorted(counts.items()))


def _model_report(
    context: RunContext,
    *,
    files: ModelFiles,
    structure: ModelStructure,
    data: Preparation,
    data_hash: str,
    memory: MemoryNeed | None,
    rehearsal: RehearsalReport,
    findings: list[Finding],
) -> ModelReport:
    training, train = context.plan.training, data.splits[TRAIN]
    return ModelReport(
        plan_sha256=context.plan_sha256,
        model_digest=files.digest,
        model_files=file_digests(context.base_model) if context.plan.merge.enabled else {},
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
        memory=dict(memory.terms) if memory is not None else {},
        rehearsal=rehearsal,
        warnings=tuple(findings),
    )


def _accepted(context: RunContext, report: ModelReport, memory: MemoryNeed | None) -> TerminationReport:
    write_durably(context.workspace.model_report, report.model_dump_json(indent=1).encode())
    return TerminationReport(
        role=Role.PREFLIGHT,
        attempt=context.attempt,
        outcome=Outcome.SUCCEEDED,
        message=(
            f"{report.train_sequences} training sequences, {report.total_steps} steps, {report.trainable_parameters} trained values"
        ),
        time=time.time(),
        findings=_reported(report.warnings),
        findings_total=len(report.warnings),
        facts={
            "data_hash": report.data_hash,
            "model_digest": report.model_digest,
            "train_sequences": str(report.train_sequences),
            "supervised_tokens": str(report.supervised_tokens),
            "trainable_parameters": str(report.trainable_parameters),
            "total_steps": str(report.total_steps),
            "wrap_classes": ",".join(report.wrap_classes),
            "rehearsal": report.rehearsal.verdict.value,
            "rehearsal_seconds": str(report.rehearsal.seconds),
            **(memory.facts if memory is not None else {}),
        },
    )


def _refused(context: RunContext, findings: list[Finding], memory: MemoryNeed | None) -> TerminationReport:
    errors = _errors(findings)
    first = errors[0]
    return TerminationReport(
        role=Role.PREFLIGHT,
        attempt=context.attempt,
        outcome=Outcome.REFUSED,
        failure=_failure(first),
        message=f"{len(errors)} error{'s' if len(errors) > 1 else ''}; first: {first.field}: {first.message}",
        hint=first.fix,
        time=time.time(),
        findings=_reported([*errors, *(finding for finding in findings if finding.severity != "error")]),
        findings_total=len(findings),
        facts=memory.facts if memory is not None else {},
    )


def _failure(finding: Finding) -> FailureClass:
    if finding.field.startswith("spec.data."):
        return FailureClass.USER_DATA
    if finding.field.startswith("spec.model."):
        return FailureClass.USER_MODEL
    return FailureClass.USER_CONFIG


def _errors(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.severity == "error"]


def _reported(findings: list[Finding] | tuple[Finding, ...]) -> list[ReportedFinding]:
    return [
        ReportedFinding(
            rule=finding.rule,
            severity=finding.severity,
            field=finding.field,
            value=finding.value,
            message=finding.message,
            fix=finding.fix,
        )
        for finding in findings
    ]

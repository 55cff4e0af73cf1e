"""Inspects storage, files, tokenizer and data of a job, and has the checks that need only these and the model's structure.

model_process.py inspects the model itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace

from finetune_job.catalogue.book import make_finding
from finetune_job.device import large_on_cpu
from finetune_job.finding import Finding
from finetune_job.plan.element_types import VALUE_BYTES
from finetune_memory.optimizers import FORMS
from finetune_trainer.checkpoint.manifest import read_manifest, verify_file
from finetune_trainer.checkpoint.retention import checkpoint_directories
from finetune_trainer.checkpoint.start import START_FIELD, START_HINT, origin_of, start_directory, start_problem
from finetune_trainer.context import RunContext
from finetune_trainer.data.prepare import prepare
from finetune_trainer.data.shards import TRAIN
from finetune_trainer.data.steps import fit_batch
from finetune_trainer.data.tokenizer import load_checked_tokenizer
from finetune_trainer.errors import CheckpointError
from finetune_trainer.inspection.base_name import GUESSED, adapter_base_problem
from finetune_trainer.inspection.model_files import inspect_model_files
from finetune_trainer.inspection.special_files import FIELD as MODEL_FIELD
from finetune_trainer.inspection.special_files import UNUSABLE_FILE
from finetune_trainer.observe.trackers import unknown_trackers
from finetune_trainer.preflight.added_tokens import add_tokens
from finetune_trainer.preflight.expressions import uncompiled_expressions
from finetune_trainer.preflight.inspection import Inspection
from finetune_trainer.preflight.memory import memory_need
from finetune_trainer.preflight.model_process import start_check
from finetune_trainer.preflight.places import no_room, not_vacant, not_writable
from finetune_trainer.processes.start import torch_is_here
from finetune_trainer.weights.finite import first_not_finite

BYTES_PER_VALUE = 4
"""Maximum number of bytes of a trained value and of each value of the optimizer state (float32)."""
MOST_READ_BYTES = 1 << 34
"""Maximum size of weights that are checked for NaN and infinity even if the job does not merge."""


def inspect_files(context: RunContext, until_done: ExitStack) -> Inspection:
    """Inspects storage, model files, tokenizer and expressions, and starts the process that inspects the model.

    That process imports its libraries while the tokenizer is loaded. Leaves nothing behind, except a base with added tokens.
    until_done: kills that process when it closes.
    """
    plan, location = context.plan, context.plan.model.location
    findings = _check_storage(context)
    is_writable = not findings
    if (unknown := unknown_trackers(plan)) is not None:
        findings.append(unknown)
    claim = context.claims_root / location.claim
    files = inspect_model_files(context.source_model, f"pvc://{location.claim}/{location.path}", claim)
    findings += files.findings
    added, model_process, tokenizer = None, None, None
    if plan.model.added_tokens and files.digest and is_writable:
        problems, added = add_tokens(context)
        findings += problems
        if added is not None:
            context = context.with_trained_rows()
    # PEFT also compiles the expressions while the model is inspected, and some would take minutes and gigabytes.
    expressions = uncompiled_expressions(plan.method)
    # With added tokens, the base to train is preflight's copy, not the directory that the job names.
    can_be_built = bool(files.digest) and (added is not None or not plan.model.added_tokens) and not expressions
    if can_be_built and not torch_is_here():
        model_process = until_done.enter_context(start_check(context.plan, context.base_model))
    if context.base_model.is_dir() and not any(finding.rule == UNUSABLE_FILE for finding in findings):
        # Only a guessed name is reported: programs may load the wrong model by it, but without a name, loading the adapter fails.
        base_name = adapter_base_problem(plan.model.name, context.base_model) if plan.method.trains_adapter else None
        if base_name is not None and base_name.rule == GUESSED:
            findings.append(base_name)
        tokenizer, problems = load_checked_tokenizer(context.plan, context.base_model)
        findings += problems
    return Inspection(
        context,
        (*findings, *expressions),
        is_writable,
        files,
        added,
        tokenizer,
        can_be_built=can_be_built,
        model_process=model_process,
    )


def _check_storage(context: RunContext) -> list[Finding]:
    """Checks that the current user can write to the directories, and that the output holds no results of other jobs."""
    plan = context.plan
    problems = [
        not_writable("spec.workspace", plan.workspace, context.claims_root),
        not_writable("spec.output.destination", plan.output, context.claims_root),
    ]
    if not context.workspace.adapter.exists():
        # Once this job has trained, results at the output are its own.
        results = (context.output.adapter, context.output.merged)
        problems.append(not_vacant("spec.output.destination", plan.output, results))
    return [finding for finding in problems if finding is not None]


def inspect_data(seen: Inspection, until_done: ExitStack) -> Inspection:
    """Reads and checks the records, even without a tokenizer or a writable directory, and estimates the memory of training.

    until_done: removes unpublished data when it closes.
    """
    context = seen.context
    data = until_done.enter_context(
        prepare(
            seen.plan.data,
            context.claims_root,
            context.base_model,
            seen.tokenizer if seen.is_writable else None,
            context.workspace.prepared,
            allow_remote_code=seen.plan.model.allow_remote_code,
        )
    )
    if seen.structure is not None and TRAIN in data.splits:
        batches = fit_batch(context.plan, data.splits[TRAIN].num_sequences, seen.structure.batches)
        seen = replace(seen, structure=replace(seen.structure, batches=batches))
    # The memory planner does not know every model. Without a known structure there is no estimate.
    memory = None if seen.structure is None else memory_need(seen.plan, seen.structure, data.splits)
    return replace(seen, data=data, memory=memory, findings=(*seen.findings, *data.findings))


def check_start(seen: Inspection) -> Iterable[Finding]:
    """Checks that the checkpoint from which training starts is complete and holds the trained parameters."""
    try:
        directory = start_directory(seen.context)
        # A job that has saved its own checkpoint does not read the start checkpoint again.
        if seen.structure is None or directory is None or checkpoint_directories(seen.context.workspace.checkpoints):
            return ()
        manifest = read_manifest(directory, None)
        for entry in manifest.files:
            verify_file(directory, entry)
        problem = start_problem(directory, manifest, seen.structure.trainable, origin_of(seen.context))
    except (CheckpointError, OSError) as error:
        problem = str(error)
    if not problem:
        return ()
    value = seen.context.plan.training.start_from
    path = "" if value is None else value.path
    return (make_finding("start-not-usable", field=START_FIELD, value=path, message=problem, fix=START_HINT),)


def check_finite(seen: Inspection) -> Iterable[Finding]:
    """Reports a weight of the base that is not finite, if its files are read anyway or are small."""
    if seen.structure is None or not (seen.plan.merge.enabled or seen.files.weight_bytes <= MOST_READ_BYTES):
        return ()
    wrong = first_not_finite(seen.context.base_model)
    if wrong is None:
        return ()
    return (
        make_finding(
            "model-weight-not-finite",
            field=MODEL_FIELD,
            value=wrong.name,
            message=f"{wrong.name} in {wrong.file.name} holds NaN or infinity, so the loss would be NaN in the first step",
            fix="copy the file to the claim again, or take another base: what wrote this one went wrong",
        ),
    )


def check_memory(seen: Inspection) -> Iterable[Finding]:
    """Reports a job that needs more memory than there is, or a large model on CPUs."""
    if seen.structure is None:
        return ()
    shape, adapts = seen.structure.shape, seen.plan.method.trains_adapter
    base = [] if shape is None else [parameter for parameter in shape.parameters if not parameter.is_trained or not adapts]
    size = None if shape is None else sum(parameter.numel for parameter in base)
    findings = (large_on_cpu(seen.plan, size), None if seen.memory is None else seen.memory.finding)
    return [finding for finding in findings if finding is not None]


def check_room(seen: Inspection) -> Iterable[Finding]:
    """Checks that the claims have room for what this job still has to write."""
    plan, context, structure = seen.plan, seen.context, seen.structure
    if structure is None or not seen.is_writable:
        return ()
    trained = sum(math.prod(shape) for shape in structure.trainable.values())
    findings = []
    if not context.workspace.checkpoints.exists():
        # Room is needed for the trained weights, the kept checkpoints, the best checkpoint, and one more, because the newest is
        # complete before the oldest is removed.
        checkpoints = plan.checkpoint.keep + 1 + plan.evaluation.load_best_model_at_end
        values = checkpoints * (1 + len(FORMS[plan.training.optimizer].tensors)) + 1
        needed = values * trained * BYTES_PER_VALUE
        findings.append(no_room("spec.workspace", plan.workspace, context.claims_root, needed, "checkpoints and trained weights"))
    if not context.workspace.adapter.exists():
        needed = trained * BYTES_PER_VALUE
        if plan.merge.enabled:
            merged = plan.merge.dtype.value if plan.merge.dtype else structure.stored_dtype
            needed += seen.files.weight_bytes * VALUE_BYTES[merged] // VALUE_BYTES[structure.stored_dtype]
        findings.append(no_room("spec.output.destination", plan.output, context.claims_root, needed, "the results"))
    return [finding for finding in findings if finding is not None]

"""The steps that fill in a `JobInspection`: storage, files, tokenizer, data and memory, with the findings of each.

A process that roles/preflight.py starts inspects the structure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from finetune_job.catalogue.book import make_finding
from finetune_job.device import large_on_cpu
from finetune_job.finding import Finding
from finetune_job.plan.element_types import VALUE_BYTES
from finetune_memory.optimizers import FORMS
from finetune_trainer.checkpoint.manifest import read_manifest, verify_file
from finetune_trainer.checkpoint.retention import checkpoint_directories
from finetune_trainer.checkpoint.start import START_FIELD, START_HINT, start_directory, start_problem
from finetune_trainer.data.prepare import prepare
from finetune_trainer.data.tokenizer import load_checked_tokenizer
from finetune_trainer.errors import CheckpointError
from finetune_trainer.inspection.base_name import GUESSED, adapter_base_problem
from finetune_trainer.inspection.model_files import inspect_model_files
from finetune_trainer.observe.trackers import unknown_trackers
from finetune_trainer.preflight.checks import JobInspection
from finetune_trainer.preflight.memory import memory_need
from finetune_trainer.preflight.places import no_room, not_vacant, not_writable

BYTES_PER_VALUE = 4
"""Bytes of a trained value and of its optimizer state: float32 at most."""


def check_trackers(seen: JobInspection) -> Iterable[Finding]:
    """Reports experiment trackers that the image does not offer."""
    unknown = unknown_trackers(seen.plan)
    return () if unknown is None else (unknown,)


def check_storage(seen: JobInspection) -> Iterable[Finding]:
    """Fills in `storage_is_ready`: whether the current user can write the directories. Leaves nothing behind."""
    context = seen.context
    problems = [
        not_writable("spec.workspace", seen.plan.workspace, context.claims_root),
        not_writable("spec.output.destination", seen.plan.output, context.claims_root),
    ]
    if not context.workspace.adapter.exists():
        # Once this job has trained, the results at the output are its own.
        results = (context.output.adapter, context.output.merged)
        problems.append(not_vacant("spec.output.destination", seen.plan.output, results))
    findings = [finding for finding in problems if finding is not None]
    seen.storage_is_ready = not findings
    return findings


def check_files(seen: JobInspection) -> Iterable[Finding]:
    """Fills in `files`."""
    location = seen.plan.model.location
    claim = seen.context.claims_root / location.claim
    seen.files = inspect_model_files(seen.context.source_model, f"pvc://{location.claim}/{location.path}", claim)
    return seen.files.findings


def check_base_name(seen: JobInspection) -> Iterable[Finding]:
    """Warns if the adapter will name a base by a guess alone.

    If it names none, loading it fails with an error; only its author's machine reports that.
    """
    model = seen.plan.model
    finding = adapter_base_problem(model.name, seen.context.base_model) if seen.plan.method.trains_adapter else None
    return () if finding is None or finding.rule != GUESSED else (finding,)


def check_tokenizer(seen: JobInspection) -> Iterable[Finding]:
    """Fills in `tokenizer`."""
    seen.tokenizer, findings = load_checked_tokenizer(seen.plan, seen.context.base_model)
    return findings


def check_data(seen: JobInspection) -> Iterable[Finding]:
    """Fills in `data`. Records are checked even without a tokenizer or a writable directory."""
    plan, context = seen.plan, seen.context
    seen.data = seen.until_done.enter_context(
        prepare(
            plan.data,
            context.claims_root,
            context.base_model,
            seen.tokenizer if seen.storage_is_ready else None,
            context.workspace.prepared,
            allow_remote_code=plan.model.allow_remote_code,
        )
    )
    return seen.data.findings


def check_start(seen: JobInspection) -> Iterable[Finding]:
    """Checks that the checkpoint from which training starts is complete and holds what is trained."""
    try:
        directory = start_directory(seen.context)
        # A job that has saved its own checkpoint never reads the other one again.
        if directory is None or checkpoint_directories(seen.context.workspace.checkpoints):
            return ()
        manifest = read_manifest(directory, None)
        for entry in manifest.files:
            verify_file(directory, entry)
        added = [token.content for token in seen.context.plan.model.added_tokens]
        problem = start_problem(directory, manifest, seen.known_structure.trainable, added_tokens=added)
    except (CheckpointError, OSError) as error:
        problem = str(error)
    if not problem:
        return ()
    value = seen.context.plan.training.start_from
    path = "" if value is None else value.path
    return (make_finding("start-not-usable", field=START_FIELD, value=path, message=problem, fix=START_HINT),)


def check_memory(seen: JobInspection) -> Iterable[Finding]:
    """Fills in `memory`, if the planner knows the model."""
    seen.memory = memory_need(seen.plan, seen.known_structure, seen.known_data.splits)
    shape, adapts = seen.known_structure.shape, seen.plan.method.trains_adapter
    is_base = [] if shape is None else [parameter for parameter in shape.parameters if not parameter.is_trained or not adapts]
    size = None if shape is None else sum(parameter.numel for parameter in is_base)
    findings = (large_on_cpu(seen.plan, size), None if seen.memory is None else seen.memory.finding)
    return [finding for finding in findings if finding is not None]


def check_room(seen: JobInspection) -> Iterable[Finding]:
    """Checks that there is room for what this job still has to write."""
    plan, context = seen.plan, seen.context
    trained = sum(math.prod(shape) for shape in seen.known_structure.trainable.values())
    findings = []
    if not context.workspace.checkpoints.exists():
        # One checkpoint more than is kept, because the newest is complete before the oldest is removed; the best; the trained
        # weights.
        checkpoints = plan.checkpoint.keep + 1 + plan.evaluation.load_best_model_at_end
        values = checkpoints * (1 + len(FORMS[plan.training.optimizer].tensors)) + 1
        needed = values * trained * BYTES_PER_VALUE
        findings.append(no_room("spec.workspace", plan.workspace, context.claims_root, needed, "checkpoints and trained weights"))
    if not context.workspace.adapter.exists():
        needed = _merged_bytes(seen) + trained * BYTES_PER_VALUE
        findings.append(no_room("spec.output.destination", plan.output, context.claims_root, needed, "the results"))
    return [finding for finding in findings if finding is not None]


def _merged_bytes(seen: JobInspection) -> int:
    """Returns the size of the merged model's weights, in the merged element type."""
    plan, stored = seen.plan, seen.known_structure.stored_dtype
    if not plan.merge.enabled:
        return 0
    merged = plan.merge.dtype.value if plan.merge.dtype else stored
    return seen.known_files.weight_bytes * VALUE_BYTES[merged] // VALUE_BYTES[stored]

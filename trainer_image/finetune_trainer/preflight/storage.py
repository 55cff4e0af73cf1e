"""Can the job's directories be written, as the user that runs it, and is there room? Leaves nothing behind."""

from __future__ import annotations

import math

from finetune_job.finding import Finding
from finetune_job.plan.element_types import DTYPE_BYTES
from finetune_memory.optimizers import FORMS
from finetune_trainer.preflight.checks import JobInspection
from finetune_trainer.preflight.places import no_room, not_vacant, not_writable

BYTES_PER_VALUE = 4
"""Of a trained value and of its optimizer state: float32 at most."""


def check_storage(seen: JobInspection) -> list[Finding]:
    """Fill in `storage_is_ready`."""
    context = seen.context
    found = [
        not_writable("spec.workspace", seen.plan.workspace, context.claims_root),
        not_writable("spec.output.destination", seen.plan.output, context.claims_root),
    ]
    if not context.workspace.adapter.exists():
        # Once this job has trained, what is at the output is its own.
        results = (context.output.adapter, context.output.merged)
        found.append(not_vacant("spec.output.destination", seen.plan.output, results))
    findings = [finding for finding in found if finding is not None]
    seen.storage_is_ready = not findings
    return findings


def check_room(seen: JobInspection) -> list[Finding]:
    """Room for what this job has still to write."""
    plan, context = seen.plan, seen.context
    trained = sum(math.prod(shape) for shape in seen.known_structure.trainable.values())
    found = []
    if not context.workspace.checkpoints.exists():
        # One checkpoint more than is kept, because the newest is complete before the oldest goes; the best; the trained weights.
        checkpoints = plan.checkpoint.keep + 1 + plan.evaluation.load_best_model_at_end
        values = checkpoints * (1 + len(FORMS[plan.training.optimizer].tensors)) + 1
        needed = values * trained * BYTES_PER_VALUE
        found.append(no_room("spec.workspace", plan.workspace, context.claims_root, needed, "checkpoints and trained weights"))
    if not context.workspace.adapter.exists():
        needed = _merged_bytes(seen) + trained * BYTES_PER_VALUE
        found.append(no_room("spec.output.destination", plan.output, context.claims_root, needed, "the results"))
    return [finding for finding in found if finding is not None]


def _merged_bytes(seen: JobInspection) -> int:
    """Of the merged model's weights, in the element type that it is to have."""
    plan, stored = seen.plan, seen.known_structure.stored_dtype
    if not plan.merge.enabled:
        return 0
    merged = plan.merge.dtype.value if plan.merge.dtype else stored
    return seen.known_files.weight_bytes * DTYPE_BYTES[merged] // DTYPE_BYTES[stored]

"""Can the job's directories be written, as the user that runs it, and is there room? Leaves nothing behind."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from finetune_job.api.base import ClaimPath
from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_job.plan.element_types import DTYPE_BYTES
from finetune_memory.optimizers import FORMS
from finetune_trainer.preflight.checks import JobInspection

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


def not_writable(field: str, location: ClaimPath, claims_root: Path) -> Finding | None:
    """Write and remove a file in the directory, or in the nearest one above it that exists."""
    claim = claims_root / location.claim
    address = f"pvc://{location.claim}/{location.path}"
    if not claim.is_dir():
        return make_finding(
            "claim-not-mounted",
            field=field,
            value=address,
            message=f"the claim {location.claim} is not mounted at {claim}",
            fix="name a claim of the job's namespace",
        )
    directory = _nearest_existing(claim / location.path)
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".write-probe-") as probe:
            probe.write(b"\0" * 4096)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return make_finding(
            "directory-not-writable",
            field=field,
            value=address,
            message=f"user {os.getuid()}, group {os.getgid()} cannot write to {directory} ({error.strerror})",
            fix="give the profile an fsGroup that owns the volume, or name a claim that is not read-only",
        )
    return None


def no_room(field: str, location: ClaimPath, claims_root: Path, needed_bytes: int, what: str) -> Finding | None:
    """At least `needed_bytes` are free on the claim."""
    statistics = os.statvfs(_nearest_existing(claims_root / location.claim / location.path))
    free_bytes = statistics.f_bavail * statistics.f_frsize
    if free_bytes >= needed_bytes:
        return None
    return make_finding(
        "claim-too-small",
        field=field,
        value=f"pvc://{location.claim}/{location.path}",
        message=f"{what} need {_shown(needed_bytes)}, the claim has {_shown(free_bytes)} free",
        fix="enlarge the claim, or make room on it",
    )


def not_vacant(field: str, location: ClaimPath, results: Iterable[Path]) -> Finding | None:
    """None of `results` exists: another job's results are never overwritten."""
    taken = [path.name for path in results if path.exists()]
    if not taken:
        return None
    return make_finding(
        "output-exists",
        field=field,
        value=f"pvc://{location.claim}/{location.path}",
        message=f"the directory holds {' and '.join(taken)} already, which are the results of another job",
        fix="choose another destination, or move the old results away",
    )


def _nearest_existing(path: Path) -> Path:
    return path if path.exists() else _nearest_existing(path.parent)


def _shown(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"

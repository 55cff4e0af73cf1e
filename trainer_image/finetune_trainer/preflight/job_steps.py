"""The steps that fill in a `JobInspection`: files, tokenizer, data and memory, with what is wrong with each.

The structure is looked at by a process that roles/preflight.py starts.
"""

from __future__ import annotations

from collections.abc import Iterable

from finetune_job.device import large_on_cpu
from finetune_job.finding import Finding
from finetune_trainer.data.prepare import prepare
from finetune_trainer.data.tokenizer import load_checked_tokenizer
from finetune_trainer.inspection.model_files import inspect_model_files
from finetune_trainer.observe.trackers import unknown_trackers
from finetune_trainer.preflight.checks import JobInspection
from finetune_trainer.preflight.memory import memory_need


def check_trackers(seen: JobInspection) -> Iterable[Finding]:
    """Experiment trackers that the image does not offer."""
    unknown = unknown_trackers(seen.plan)
    return () if unknown is None else (unknown,)


def check_files(seen: JobInspection) -> Iterable[Finding]:
    """Fill in `files`."""
    location = seen.plan.model.location
    claim = seen.context.claims_root / location.claim
    seen.files = inspect_model_files(seen.context.base_model, f"pvc://{location.claim}/{location.path}", claim)
    return seen.files.findings


def check_tokenizer(seen: JobInspection) -> Iterable[Finding]:
    """Fill in `tokenizer`."""
    seen.tokenizer, found = load_checked_tokenizer(seen.plan, seen.context.base_model)
    return found


def check_data(seen: JobInspection) -> Iterable[Finding]:
    """Fill in `data`. Without a tokenizer, or a place to write, records are checked all the same."""
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


def check_memory(seen: JobInspection) -> Iterable[Finding]:
    """Fill in `memory`, as far as the planner knows the model."""
    seen.memory = memory_need(seen.plan, seen.known_structure, seen.known_data.splits)
    shape = seen.known_structure.shape
    size = None if shape is None else sum(each.numel for each in shape.parameters if not each.is_trained)
    found = (large_on_cpu(seen.plan, size), None if seen.memory is None else seen.memory.finding)
    return [finding for finding in found if finding is not None]

"""JSON merge patches of manifests (RFC 7396): what helps after a failure, what turns one object into another, and as `--set`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from finetune_cli.jobs import documents
from finetune_cli.jobs.seen import SeenJob
from finetune_job.api.training import CheckpointSpec, TrainingSpec
from finetune_job.failures import FailureClass

Patch = dict[str, Any]
_MOST_TIMEOUT_SECONDS = 86_400
"""The API takes no more."""
_SLOWER = 0.5
"""What a learning rate that diverged is multiplied by."""


def patch_for(failure: FailureClass, job: SeenJob) -> Patch | None:
    """What to change in a new job after such a failure, if a change of settings can help; None if not.

    The result of training is the same with the changes for memory and disk. A lower learning rate is a proposal.
    """
    match failure:
        case FailureClass.DEVICE_OUT_OF_MEMORY:
            micro = _effective(job, "microBatchSize")
            if isinstance(micro, int) and micro > 1:
                return {"spec": {"training": {"microBatchSize": micro // 2 if micro % 2 == 0 else 1}}}
            if _effective(job, "activationCheckpointing") != "Full":
                return {"spec": {"training": {"activationCheckpointing": "Full"}}}
        case FailureClass.NON_FINITE:
            rate = _effective(job, "learningRate")
            number = documents.decimal(rate) if isinstance(rate, str) else None
            if number is not None and number > 0:
                return {"spec": {"training": {"learningRate": f"{number * _SLOWER:.6g}"}}}
        case FailureClass.STALLED:
            seconds = documents.number(job.spec, "training", "stepTimeoutSeconds") or TrainingSpec().step_timeout_seconds
            longer = min(2 * seconds, _MOST_TIMEOUT_SECONDS)
            return {"spec": {"training": {"stepTimeoutSeconds": longer}}} if longer > seconds else None
        case FailureClass.DISK_FULL:
            keep, least = documents.number(job.spec, "checkpoint", "keep"), CheckpointSpec().keep
            return {"spec": {"checkpoint": {"keep": least}}} if keep is not None and keep > least else None
    return None


def _effective(job: SeenJob, setting: str) -> object:
    """A setting of training as the manifest or, if it leaves it open, the plan has it."""
    found = documents.value(job.spec, "training", setting)
    if found is not None or job.status.plan is None:
        return found
    for choice in job.status.plan.choices:
        if choice.field == f"spec.training.{setting}":
            try:
                return json.loads(choice.value)
            except (ValueError, RecursionError):
                return None
    return None


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> Patch:
    """What turns one object into the other, as a JSON merge patch (RFC 7396); empty if they are the same."""
    patch: Patch = {key: None for key in before if key not in after}
    for key, value in after.items():
        earlier = before.get(key)
        if isinstance(value, Mapping) and isinstance(earlier, Mapping):
            inner = merge_patch(earlier, value)
            if inner:
                patch[key] = inner
        # Compared as text: true is not 1.
        elif key not in before or json.dumps(earlier) != json.dumps(value):
            patch[key] = value
    return patch


def assignments(patch: Mapping[str, Any], path: str) -> Iterable[str]:
    """A patch as `fork --set` takes it: texts as they are, other values as JSON, nothing for a field that goes."""
    for key, value in patch.items():
        place = f"{path}{key}"
        if isinstance(value, Mapping):
            yield from assignments(value, f"{place}.")
        else:
            yield f"{place}=" + ("" if value is None else value if isinstance(value, str) else json.dumps(value))

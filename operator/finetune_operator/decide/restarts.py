"""The restart counters of each role in status: no role draws on another's budget."""

from __future__ import annotations

from typing import Any

from finetune_job.api.status import FineTuneJobStatus, Restarts
from finetune_job.names import Role


def restarts_of(status: FineTuneJobStatus, role: Role) -> Restarts:
    """Counters of a role."""
    if role is Role.TRAIN:
        return status.restarts
    counters: Restarts = getattr(status.role_restarts, role.value)
    return counters


def with_restarts(status: FineTuneJobStatus, role: Role, restarts: Restarts) -> dict[str, Any]:
    """Fields of the status, as `PassResult.set` takes them, that set the counters of a role."""
    if role is Role.TRAIN:
        return {"restarts": restarts}
    return {"role_restarts": status.role_restarts.model_copy(update={role.value: restarts})}


def newest_checkpoint(status: FineTuneJobStatus, role: Role) -> int | None:
    """Step of the newest checkpoint that the operator has heard of; the other roles have none."""
    if role is not Role.TRAIN or status.progress is None:
        return None
    return status.progress.checkpoint_step

"""Notes that are kept about a FineTuneJob between passes, besides the cluster's own objects; they are dropped with the job.

They may be lost at any time: a new leader learns them again from the answers that it gets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from finetune_job.progress import Progress
from finetune_operator.cluster.answers import ApiError
from finetune_operator.cluster.kinds import Kind
from finetune_operator.decide.children_seen import LiveChildren, RefusedWrite

FIRST_RETRY_SECONDS = 5.0
LONGEST_RETRY_SECONDS = 300.0
LONGEST_MESSAGE = 1024


@dataclass(frozen=True)
class LiveList:
    """A live list, and the state of the cache that it was made in."""

    children: LiveChildren
    fingerprint: frozenset[tuple[str, int]]
    at: datetime
    is_watched: bool
    """Whether an event will come for everything that it shows."""


@dataclass(slots=True)
class JobNotes:
    """Notes about one job."""

    conflicts: frozenset[tuple[Kind, str]] = frozenset()
    """Objects that creates met and that are not ours."""
    progress: Progress | None = None
    refused: RefusedWrite | None = None
    listed: LiveList | None = None
    looked_up: dict[str, datetime] | None = None
    """UID of an object that no watch shows -> when it was last read."""
    told_ahead: tuple[datetime, int] | None = None
    """When the number of jobs ahead in the line was last reported, and that number."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is noted, which is so for nearly every job."""
        return not (self.conflicts or self.looked_up or self.progress or self.refused or self.listed or self.told_ahead)


def refused_write(
    before: RefusedWrite | None, child: tuple[str, str], error: ApiError, now: datetime, draw: Callable[[], float]
) -> RefusedWrite:
    """Note a create that the server refused, perhaps again. `child`: kind and name.

    `draw`: returns a number from 0 to 1, so that jobs that were refused together are not retried together.
    """
    kind, name = child
    tries = 1 if before is None else before.tries + 1
    longest = min(FIRST_RETRY_SECONDS * 2.0 ** min(tries - 1, 16), LONGEST_RETRY_SECONDS)
    pause = max(longest * (0.75 + 0.25 * draw()), FIRST_RETRY_SECONDS, error.retry_after)
    is_same = before is not None and (before.kind, before.name, before.code) == (kind, name, error.code)
    return RefusedWrite(
        kind=kind,
        name=name,
        code=error.code,
        message=error.message[:LONGEST_MESSAGE],
        since=before.since if before is not None and is_same else now,
        tries=tries,
        retry_at=now + timedelta(seconds=pause),
    )

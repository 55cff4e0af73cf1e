"""Notes about a FineTuneJob that are kept between passes, in addition to the cached objects, and dropped with the job.

They may be lost at any time: a new leader recovers them from the server's answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from finetune_job.progress import Progress
from finetune_operator.client.answers import ApiError
from finetune_operator.client.kinds import Kind
from finetune_operator.decide.seen.children_seen import LiveChildren, RefusedWrite

FIRST_RETRY_SECONDS = 5.0
LONGEST_RETRY_SECONDS = 300.0
LONGEST_MESSAGE = 1024


@dataclass(frozen=True)
class LiveList:
    """A live list, and the state of the cache at that time."""

    children: LiveChildren
    fingerprint: frozenset[tuple[str, int]]
    at: datetime
    is_watched: bool
    """Whether everything that the list shows is watched."""


@dataclass(slots=True)
class JobNotes:
    """Notes about one job."""

    conflicts: frozenset[tuple[Kind, str]] = frozenset()
    """Objects that are not ours but have the names of children that were to be created."""
    progress: Progress | None = None
    refused: RefusedWrite | None = None
    listed: LiveList | None = None
    reported_ahead: tuple[datetime, int] | None = None
    """When the number of jobs ahead in line was last reported, and that number."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is noted, as is the case for nearly all jobs."""
        return not (self.conflicts or self.progress or self.refused or self.listed or self.reported_ahead)


def refused_write(
    before: RefusedWrite | None, child: tuple[str, str], error: ApiError, now: datetime, draw: Callable[[], float]
) -> RefusedWrite:
    """Return the note about a write that the server refused, perhaps not for the first time. `child`: kind and name.

    For a different child, pauses start with the shortest again, because earlier refusals say nothing about it. `draw` returns a
    random number from 0 to 1, so that jobs that were refused together are not retried together.
    """
    kind, name = child
    tries = before.tries + 1 if before is not None and (before.kind, before.name) == child else 1
    longest = min(FIRST_RETRY_SECONDS * 2.0 ** min(tries - 1, 16), LONGEST_RETRY_SECONDS)
    pause = max(longest * (0.75 + 0.25 * draw()), FIRST_RETRY_SECONDS, error.retry_after)
    return RefusedWrite(
        kind=kind,
        name=name,
        code=error.code,
        message=error.message[:LONGEST_MESSAGE],
        tries=tries,
        retry_at=now + timedelta(seconds=pause),
    )

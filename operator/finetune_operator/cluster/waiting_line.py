"""Jobs that wait for their turn under a profile's `maxActiveJobs`: a line for each namespace and profile, the oldest job first.

Places are counted from the cache each time. Passes of several jobs may see the same free place, so a job counts as active from
the moment in which the write that starts it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import NamedTuple

from finetune_operator.cluster.kinds import JobKey
from finetune_operator.cluster.projection import CachedObject

BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)


class _Place(NamedTuple):
    """The place of a job in a line. The active jobs sort first, then the oldest; names decide between jobs of one second."""

    is_waiting: bool
    created: datetime
    name: str
    uid: str


class WaitingLines:
    """The lines of all namespaces and profiles."""

    def __init__(self, jobs: Mapping[str, CachedObject], limit_of: Callable[[str], int | None]) -> None:
        self._jobs = jobs
        """The cached jobs by UID."""
        self._limit_of = limit_of
        """Profile -> its `maxActiveJobs`; None if it sets no limit."""
        self._starting: set[str] = set()
        """UIDs of jobs whose start has been sent, and of which no later state is known."""
        self.turn_has_come: Callable[[JobKey], None] = lambda _: None
        """Called with each job that may start because another one has left its place. No watch would wake it if the other one
        left by a write of our own.
        """

    def ahead_of(self, cached: CachedObject) -> int:
        """Count the jobs that are active, or wait and are older, in the line of a job that waits."""
        own = _place(cached, is_waiting=True)
        return sum(place < own and place.uid != own.uid for place in self._places(_line_of(cached)))

    def start(self, cached: CachedObject, limit: int) -> bool:
        """Count a job as active whose start is about to be sent. Returns whether there was a place for it."""
        if cached.key.uid not in self._starting and self.ahead_of(cached) >= limit:
            return False
        self._starting.add(cached.key.uid)
        return True

    def is_starting(self, uid: str) -> bool:
        """Whether the start of the job was sent and it is not known what became of it."""
        return uid in self._starting

    def settle(self, uid: str) -> None:
        """Take in that the start of a job came to nothing, or that its state is known."""
        if uid in self._starting:
            self._starting.discard(uid)
            cached = self._jobs.get(uid)
            if cached is not None and not (cached.summary is not None and cached.summary.is_started):
                self._wake(_line_of(cached), uid)

    def moved(self, before: CachedObject, after: CachedObject | None) -> None:
        """Take in another state of a job, or that it is gone (None), and wake those whose turn has come because of it."""
        uid = before.key.uid
        # The write that starts a job has the state before as its precondition, so a later state shows what became of it.
        place = self._place(before)
        self._starting.discard(uid)
        if place is None:
            return
        new = None if after is None or _line_of(after) != _line_of(before) else self._place(after)
        if new is None or (new.is_waiting and not place.is_waiting):
            self._wake(_line_of(before), uid)

    def _wake(self, line: tuple[str, str], left: str) -> None:
        """Wake the jobs for which there is a place now, but not the one that has left its own."""
        limit = self._limit_of(line[1])
        if limit is not None:
            for place in sorted(self._places(line))[:limit]:
                if place.is_waiting and place.uid != left:
                    self.turn_has_come(JobKey(line[0], place.name))

    def _places(self, line: tuple[str, str]) -> list[_Place]:
        places = [self._place(cached) for cached in self._jobs.values() if _line_of(cached) == line]
        return [place for place in places if place is not None]

    def _place(self, cached: CachedObject) -> _Place | None:
        """The place of a job; None if it is in no line, because it has ended or cannot start yet."""
        summary = cached.summary
        if summary is None or summary.is_finished:
            return None
        is_active = summary.is_started or cached.key.uid in self._starting
        # A deleted job that a finalizer holds does not start any more.
        may_start = summary.is_waiting and not cached.key.is_deleting
        return _place(cached, is_waiting=not is_active) if is_active or may_start else None


def _place(cached: CachedObject, *, is_waiting: bool) -> _Place:
    created = cached.summary.created if cached.summary is not None else None
    return _Place(is_waiting, created or BEGINNING, cached.key.name, cached.key.uid)


def _line_of(cached: CachedObject) -> tuple[str, str]:
    return cached.key.namespace, cached.summary.profile if cached.summary is not None else ""

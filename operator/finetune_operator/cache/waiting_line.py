"""Jobs that wait for their turn under a profile's `maxActiveJobs`, in a line per namespace and profile, oldest job first.

Active jobs are counted from the cache each time. Passes of several jobs may see the same free place, so jobs are started one
at a time, and only once the outcome of the previous start is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import NamedTuple

from finetune_operator.cache.projection import CachedObject
from finetune_operator.client.kinds import JobKey

BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)


class _Place(NamedTuple):
    """The place of a job in a line. Active jobs sort first, then the oldest; jobs created in the same second sort by name."""

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
        self.starting = asyncio.Lock()
        """Held while a job is started."""
        self.unsettled: JobKey | None = None
        """The job whose start was requested last, if it is not known whether the server has carried it out."""
        self.turn_has_come: Callable[[JobKey], None] = lambda _: None
        """Called with each job that may start because another job has left its place. If that happened through a write of our
        own, no watch event would wake the waiting job."""

    def ahead_of(self, cached: CachedObject) -> int:
        """Count the jobs ahead of a waiting job in its line: all active jobs, and older waiting jobs."""
        own = _place(cached, is_waiting=True)
        return sum(place < own and place.uid != own.uid for place in self._places(_line_of(cached)))

    def moved(self, before: CachedObject, after: CachedObject | None) -> None:
        """Record a job's new state (None if the job is gone), and wake the jobs whose turn has come because of it."""
        uid = before.key.uid
        place = self._place(before)
        if place is None:
            return
        new = None if after is None or _line_of(after) != _line_of(before) else self._place(after)
        if new is None or (new.is_waiting and not place.is_waiting):
            self._wake(_line_of(before), uid)

    def _wake(self, line: tuple[str, str], left: str) -> None:
        """Wake the jobs that now have a place, except the job that has just left its place."""
        limit = self._limit_of(line[1])
        if limit is not None:
            for place in sorted(self._places(line))[:limit]:
                if place.is_waiting and place.uid != left:
                    self.turn_has_come(JobKey(line[0], place.name))

    def _places(self, line: tuple[str, str]) -> list[_Place]:
        places = [self._place(cached) for cached in self._jobs.values() if _line_of(cached) == line]
        return [place for place in places if place is not None]

    def _place(self, cached: CachedObject) -> _Place | None:
        """The place of a job; None if it is not in a line, because it has ended or cannot start yet."""
        summary = cached.summary
        if summary is None or summary.is_finished:
            return None
        # A job that is being deleted, but is kept by a finalizer, will not start.
        may_start = summary.is_waiting and not cached.key.is_deleting
        return _place(cached, is_waiting=not summary.is_started) if summary.is_started or may_start else None


def _place(cached: CachedObject, *, is_waiting: bool) -> _Place:
    created = cached.summary.created if cached.summary is not None else None
    return _Place(is_waiting, created or BEGINNING, cached.key.name, cached.key.uid)


def _line_of(cached: CachedObject) -> tuple[str, str]:
    return cached.key.namespace, cached.summary.profile if cached.summary is not None else ""

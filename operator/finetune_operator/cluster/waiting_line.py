"""The lines of jobs that wait for their turn under a profile's `maxActiveJobs`: one per namespace and profile, the oldest
first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple

from finetune_operator.cluster.kinds import JobKey
from finetune_operator.cluster.projection import CachedObject

BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)


class _Waiter(NamedTuple):
    """Sorts by age; of two jobs of one second the name decides."""

    created: datetime
    name: str
    uid: str


@dataclass
class _WaitingLine:
    active: set[str] = field(default_factory=set)
    waiting: list[_Waiter] = field(default_factory=list)


class WaitingLines:
    """Kept up to date with every state of a FineTuneJob, so that no pass has to look at all jobs."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], _WaitingLine] = {}
        self._places: dict[str, tuple[tuple[str, str], _Waiter, bool]] = {}
        """Job UID -> its line, its place, and whether it is active."""
        self._limits: dict[str, int] = {}
        """Profile -> `maxActiveJobs`, where it sets one."""

    def ahead_of(self, held: CachedObject) -> int:
        """Jobs that are active, or wait and are older, of the same namespace and profile."""
        line = self._lines.get(_line_of(held))
        if line is None:
            return 0
        return len(line.active) - (held.key.uid in line.active) + bisect_left(line.waiting, _place_of(held))

    def limit(self, profile: str, most: int | None) -> None:
        """Take in what a profile allows."""
        self._limits.pop(profile, None)
        if most is not None:
            self._limits[profile] = most

    def put(self, held: CachedObject) -> set[JobKey]:
        """Take in a state of a job. Returns the job whose turn may have come by it."""
        uid, summary = held.key.uid, held.summary
        before = self._places.get(uid)
        now = None
        if summary is not None and (summary.is_waiting or (summary.is_started and not summary.is_finished)):
            now = (_line_of(held), _place_of(held), summary.is_started)
        if before == now:
            return set()
        woken = self.drop(uid)
        if now is None:
            return woken
        self._places[uid] = now
        line = self._lines.setdefault(now[0], _WaitingLine())
        if now[2]:
            line.active.add(uid)
        else:
            insort(line.waiting, now[1])
        # Who starts goes from the line to the active ones: nobody's turn has come by that.
        return set() if before is not None and before[0] == now[0] else woken

    def drop(self, uid: str) -> set[JobKey]:
        """A job has ended or is gone. Returns the job whose turn may have come by it."""
        before = self._places.pop(uid, None)
        if before is None:
            return set()
        key, place, is_active = before
        line = self._lines[key]
        if is_active:
            line.active.discard(uid)
        else:
            del line.waiting[bisect_left(line.waiting, place)]
        if not line.active and not line.waiting:
            del self._lines[key]
        # All that were let in before have started or are about to; the one who comes up to the limit now is the last of those.
        last = self._limits.get(key[1], 0) - len(line.active) - 1
        return {JobKey(key[0], place.name) for place in line.waiting[last : last + 1]} if last >= 0 else set()


def _line_of(held: CachedObject) -> tuple[str, str]:
    return held.key.namespace, held.summary.profile if held.summary is not None else ""


def _place_of(held: CachedObject) -> _Waiter:
    created = held.summary.created if held.summary is not None else None
    return _Waiter(created or BEGINNING, held.key.name, held.key.uid)

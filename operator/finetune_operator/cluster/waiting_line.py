"""The lines of jobs that wait for their turn under a profile's `maxActiveJobs`: one per namespace and profile, the oldest
first.

A line orders those who wait, and does not bind the others: many jobs that were stalled, or that an edit has brought here, can
become ready at the same moment, and each of their passes sees a free place. So a place is reserved, in the moment in which it is
found free, before the write by which a job starts is sent.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
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
        """Job UID -> its line, its place, and whether it is active, or has reserved a place to become so."""
        self._limits: dict[str, int] = {}
        """Profile -> `maxActiveJobs`, where it sets one."""
        self.turn_has_come: Callable[[JobKey], None] = lambda _: None
        """Called with the job that may start because another one has left its place: nothing else would wake it if the
        answer to a write of our own told of that, because no watch shows it again.
        """

    def ahead_of(self, held: CachedObject) -> int:
        """Jobs that are active, or wait and are older, of the same namespace and profile."""
        line = self._lines.get(_line_of(held))
        if line is None:
            return 0
        return len(line.active) - (held.key.uid in line.active) + bisect_left(line.waiting, _place_of(held))

    def reserve(self, held: CachedObject) -> bool:
        """Count a job that is about to start as active. False: there is no place for it.

        Its next state, or `give_back`, ends the reservation. Whatever state comes next tells what has become of the write: that
        has this one as its precondition.
        """
        uid, line = held.key.uid, _line_of(held)
        limit, before = self._limits.get(line[1]), self._places.get(uid)
        if limit is None or (before is not None and before[0] == line and before[2]):
            return True
        if self.ahead_of(held) >= limit:
            return False
        self._remove(uid)
        self._add(uid, line, _place_of(held), is_active=True)
        return True

    def has_reserved(self, held: CachedObject) -> bool:
        """Whether a job that has not started, as far as is known, is counted as active."""
        before = self._places.get(held.key.uid)
        return before is not None and before[2] and not (held.summary is not None and held.summary.is_started)

    def give_back(self, held: CachedObject) -> None:
        """The job has not started: it is again what its state says."""
        self.put(held)

    def limit(self, profile: str, most: int | None) -> None:
        """Take in what a profile allows."""
        self._limits.pop(profile, None)
        if most is not None:
            self._limits[profile] = most

    def put(self, held: CachedObject) -> None:
        """Take in a state of a job."""
        uid, summary = held.key.uid, held.summary
        before = self._places.get(uid)
        now = None
        # A deleted job that a finalizer holds does not start any more.
        is_waiting = summary is not None and summary.is_waiting and not held.key.is_deleting
        if summary is not None and (is_waiting or (summary.is_started and not summary.is_finished)):
            now = (_line_of(held), _place_of(held), summary.is_started)
        if before == now:
            return
        self._remove(uid)
        if now is not None:
            key, place, is_active = now
            self._add(uid, key, place, is_active=is_active)
        # Who starts goes from the line to the active ones: nobody's turn has come by that.
        if before is not None and not (now is not None and now[0] == before[0] and now[2]):
            self._wake_next(before[0], uid)

    def _add(self, uid: str, key: tuple[str, str], place: _Waiter, *, is_active: bool) -> None:
        self._places[uid] = (key, place, is_active)
        line = self._lines.setdefault(key, _WaitingLine())
        if is_active:
            line.active.add(uid)
        else:
            insort(line.waiting, place)

    def drop(self, uid: str) -> None:
        """A job is gone."""
        before = self._places.get(uid)
        if before is not None:
            self._remove(uid)
            self._wake_next(before[0], uid)

    def _remove(self, uid: str) -> None:
        before = self._places.pop(uid, None)
        if before is None:
            return
        key, place, is_active = before
        line = self._lines[key]
        if is_active:
            line.active.discard(uid)
        else:
            del line.waiting[bisect_left(line.waiting, place)]
        if not line.active and not line.waiting:
            del self._lines[key]

    def _wake_next(self, key: tuple[str, str], left: str) -> None:
        """A place of the line is free. left: UID of the job that left it, which may wait in the same line again."""
        line = self._lines.get(key)
        if line is None:
            return
        # All that were let in before have started or are about to; the one who comes up to the limit now is the last of those.
        last = self._limits.get(key[1], 0) - len(line.active) - 1
        for place in line.waiting[last : last + 1] if last >= 0 else ():
            if place.uid != left:
                self.turn_has_come(JobKey(key[0], place.name))


def _line_of(held: CachedObject) -> tuple[str, str]:
    return held.key.namespace, held.summary.profile if held.summary is not None else ""


def _place_of(held: CachedObject) -> _Waiter:
    created = held.summary.created if held.summary is not None else None
    return _Waiter(created or BEGINNING, held.key.name, held.key.uid)

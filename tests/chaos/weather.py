"""What befalls the operator: kills at chosen writes of chosen jobs, or random faults."""

import asyncio
import random
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable

from tests.chaos.proxy import Fault, Seen

JOB_NAME = re.compile(r"chaos-\d+")
MOST_WRITES = 14
"""Writes of a job's life after and before which the operator is killed, as far as it writes so often."""
KILL_POINTS = [(write, fault) for write in range(MOST_WRITES) for fault in (Fault.KILL_AFTER, Fault.KILL_BEFORE)]


class Kills:
    """Each job has one kill point; all kill points are gone through in turn."""

    def __init__(self) -> None:
        self.operator: Callable[[], None] = lambda: None
        """Kills it; returns when it is gone and another one is started."""
        self._writes: Counter[str] = Counter()
        self._killed: set[str] = set()
        self._lock = threading.Lock()
        self.reached: dict[tuple[int, Fault], set[str]] = defaultdict(set)
        """By kill point: the writes that were hit."""
        self.counts: Counter[Fault] = Counter()

    def fault(self, seen: Seen) -> Fault | None:
        name = job_of(seen)
        if name is None:
            return None
        with self._lock:
            write = self._writes[name]
            self._writes[name] += 1
            wanted, fault = KILL_POINTS[int(name.partition("-")[2]) % len(KILL_POINTS)]
            if write != wanted or name in self._killed:
                return None
            self._killed.add(name)
            self.reached[wanted, fault].add(f"{seen.method} {kind_of(seen)}")
            self.counts[fault] += 1
            return fault

    async def kill(self) -> None:
        await asyncio.to_thread(self.operator)

    def watch_seconds(self) -> float:
        return 0.0

    def stall_seconds(self) -> float:
        return 0.0


class Faults:
    """A share of all requests goes wrong. Requests for the lease are spared: who loses it ends, as is right."""

    def __init__(self, seed: int, share: float, stalls: int, stall_seconds: float) -> None:
        self._random = random.Random(seed)
        self._share, self._stalls, self._stall_seconds = share, stalls, stall_seconds
        self.counts: Counter[Fault] = Counter()

    def fault(self, seen: Seen) -> Fault | None:
        fault = self._choose(seen)
        if fault is not None:
            self.counts[fault] += 1
        return fault

    def _choose(self, seen: Seen) -> Fault | None:
        if seen.is_lease:
            return None
        if seen.is_watch:
            faults = (None, None, None, Fault.WATCH_GONE, Fault.WATCH_CUT, Fault.WATCH_ERROR)
            return self._random.choice(faults)
        if seen.is_broad_list and self._random.random() < 0.3:
            return Fault.STALE
        if self._random.random() >= self._share:
            return None
        if self.counts[Fault.STALL] < self._stalls and self._random.random() < 0.2:
            return Fault.STALL
        return self._random.choice((Fault.TOO_MANY, Fault.ERROR, Fault.RESET_BEFORE, Fault.RESET_AFTER))

    async def kill(self) -> None:
        raise AssertionError("nothing is killed here")

    def watch_seconds(self) -> float:
        return self._random.uniform(1.0, 12.0)

    def stall_seconds(self) -> float:
        return self._stall_seconds


def job_of(seen: Seen) -> str | None:
    """Name of the job that a write is for."""
    if not seen.is_write:
        return None
    name = str((seen.body.get("metadata") or {}).get("name") or seen.path)
    found = JOB_NAME.search(name) or JOB_NAME.search(seen.path)
    return found.group() if found else None


def kind_of(seen: Seen) -> str:
    """The resource of a path, with its subresource."""
    _, _, rest = seen.path.partition("/namespaces/")
    parts = rest.split("/")
    return "/".join(parts[1:2] + parts[3:])

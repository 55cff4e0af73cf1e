"""One active replica: a small elector on a `coordination.k8s.io` Lease, in a thread and event loop of its own.

Its own loop, because a stall of the main loop must not lose the lease; and the process ends when the lease is lost, because
a replica that only believes that it leads would write beside the one that does. `hold` gives up after `renew_deadline`,
which is shorter than the duration after which others may take over, so there is always a gap between two holders.
Other holders' clocks are not trusted: a lease counts as expired when its record has not changed for its duration as seen here.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from finetune_operator.cluster.errors import ApiError, ApiUnreachableError, NotLeadingError
from finetune_operator.logs import logger

_log = logger(__name__)
Document = dict[str, Any]


class LeaseStore(Protocol):
    """Where the Lease is kept. Writes raise ApiError with a conflict where somebody else was faster."""

    async def read(self) -> Document | None:
        """The Lease, or None."""
        ...

    async def create(self, spec: Document) -> Document:
        """Make it."""
        ...

    async def replace(self, lease: Document) -> Document:
        """Write it, its resourceVersion being a precondition."""
        ...


@dataclass(frozen=True)
class LeaseTiming:
    """Seconds."""

    duration: float
    renew_deadline: float
    retry: float


class Elector:
    """Takes, renews and releases the lease for one identity."""

    def __init__(
        self,
        store: LeaseStore,
        identity: str,
        timing: LeaseTiming,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._store = store
        self._identity = identity
        self._timing = timing
        self._clock = clock
        self._sleep = sleep
        self._renewed = -math.inf
        """When the last renewal that succeeded was begun. When its answer came says nothing: others count from the write."""
        self._seen: tuple[object, float] | None = None
        """The other holder's record and when it was first seen."""

    @property
    def age(self) -> float:
        """Seconds since the lease was surely ours; infinite before that. May be read from any thread."""
        return self._clock() - self._renewed

    def fence(self) -> None:
        """Raise NotLeadingError unless the lease is so young that nobody else can hold it. May be called from any thread."""
        age = self.age
        if age >= self._timing.renew_deadline:
            raise NotLeadingError(
                f"not sent: the lease was last renewed {age:.1f} s ago, and others may take it after {self._timing.duration:g} s"
            )

    async def acquire(self) -> None:
        """Wait until the lease is ours."""
        while True:
            try:
                async with asyncio.timeout(self._timing.renew_deadline):
                    taken = await self._try_to_take()
                # An answer that took longer than a renewal may take tells of a lease that others may have by now.
                if taken and self.age < self._timing.renew_deadline:
                    return
            except (ApiError, ApiUnreachableError, TimeoutError) as error:
                _log.warning("lease not taken", error=str(error) or "no answer in time")
            await self._sleep(self._timing.retry)

    async def hold(self) -> None:
        """Renew until that has failed for `renew_deadline` or somebody else holds the lease; returning means it is lost."""
        while True:
            await self._sleep(self._timing.retry)
            left = self._timing.renew_deadline - self.age
            if left <= 0:
                return
            try:
                async with asyncio.timeout(left):
                    if not await self._try_to_take():
                        return
            except (ApiError, ApiUnreachableError, TimeoutError) as error:
                _log.warning("lease not renewed", error=str(error) or "no answer in time")

    async def release(self) -> None:
        """Give the lease back if it is ours, so that a standby need not wait for it to expire."""
        self._renewed = -math.inf
        try:
            async with asyncio.timeout(self._timing.renew_deadline):
                # Read first: a renewal may have been cut off after it was written, and its answer never seen.
                lease = await self._store.read()
                if lease is not None and _holder(lease) == self._identity:
                    spec = lease["spec"] | {"holderIdentity": "", "leaseDurationSeconds": 1}
                    await self._store.replace(lease | {"spec": spec})
        except (ApiError, ApiUnreachableError, TimeoutError) as error:
            _log.warning("lease not released", error=str(error) or "no answer in time")

    async def _try_to_take(self) -> bool:
        started = self._clock()
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        lease = await self._store.read()
        spec: Document = {} if lease is None else dict(lease.get("spec") or {})
        holder = "" if lease is None else _holder(lease)
        if lease is not None and holder and holder != self._identity and not self._is_expired(spec):
            return False
        changed: Document = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(self._timing.duration),
            "renewTime": now,
            "acquireTime": spec.get("acquireTime", now) if holder == self._identity else now,
            "leaseTransitions": int(spec.get("leaseTransitions") or 0) + (lease is not None and holder != self._identity),
        }
        try:
            await (self._store.create(changed) if lease is None else self._store.replace(lease | {"spec": changed}))
        except ApiError as error:
            if error.code != 409:
                raise
            if holder != self._identity or not await self._is_still_ours():
                return False
        self._renewed = started
        return True

    async def _is_still_ours(self) -> bool:
        """After a lost race for a lease that we held: our own earlier write may have come through without an answer, and since
        this attempt began.
        """
        lease = await self._store.read()
        return lease is not None and _holder(lease) == self._identity

    def _is_expired(self, spec: Document) -> bool:
        record = (spec.get("holderIdentity"), spec.get("renewTime"), spec.get("leaseTransitions"))
        now = self._clock()
        if self._seen is None or self._seen[0] != record:
            self._seen = (record, now)
            return False
        return now - self._seen[1] >= float(spec.get("leaseDurationSeconds") or self._timing.duration)


def _holder(lease: Document) -> str:
    return str((lease.get("spec") or {}).get("holderIdentity") or "")


class LeaseThread:
    """Runs an elector beside the main loop. `on_lost` ends the process; a test may give another."""

    def __init__(
        self,
        make_elector: Callable[[], Awaitable[tuple[Elector, Callable[[], Awaitable[None]]]]],
        on_lost: Callable[[], None] = lambda: os._exit(1),
    ) -> None:
        self._make_elector = make_elector
        """Made inside the thread, because connections belong to an event loop; the second value closes them."""
        self._on_lost = on_lost
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._elector: Elector | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_stopped = threading.Event()
        self._main = asyncio.get_running_loop()
        self.held = asyncio.Event()
        """Set in the main loop once the lease is ours."""

    def fence(self) -> None:
        """Raise NotLeadingError unless the lease is ours beyond doubt. May be called from any thread."""
        if self._elector is None:
            raise NotLeadingError("not sent: this replica does not hold the lease")
        self._elector.fence()

    def start(self) -> None:
        """Begin to compete."""
        self._thread.start()

    async def stop(self) -> None:
        """Stop competing, release a held lease and wait for the thread's end."""
        self._is_stopped.set()
        if not self._thread.is_alive():
            return
        if self._loop is not None and self._task is not None:
            # It may end by itself between any check here and the call.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._task.cancel)
        await asyncio.to_thread(self._thread.join, 15.0)

    def _run(self) -> None:
        asyncio.run(self._compete())

    async def _compete(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        if self._is_stopped.is_set():
            return
        try:
            self._elector, close = await self._make_elector()
            try:
                await self._elector.acquire()
                self._main.call_soon_threadsafe(self.held.set)
                await self._elector.hold()
                _log.error("lease lost: another replica may work from now on, this one ends")
                self._on_lost()
            except asyncio.CancelledError:
                await self._elector.release()
            finally:
                await close()
        except asyncio.CancelledError:
            return
        except Exception:  # noqa: BLE001 - whatever it is, nobody renews the lease any more
            _log.exception("lease thread failed: this replica ends")
            self._on_lost()

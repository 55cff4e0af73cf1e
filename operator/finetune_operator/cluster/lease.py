"""One active replica: a small elector on a `coordination.k8s.io` Lease, in a thread and event loop of its own.

Its own loop, because a stall of the main loop must not lose the lease; and the process ends when the lease is lost, because
a replica that only believes that it leads would write beside the one that does. `hold` gives up after `renew_deadline`,
which is shorter than the duration after which others may take over, so there is always a gap between two holders.
Other holders' clocks are not trusted: a lease counts as expired when its record has not changed for its duration as seen here.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from finetune_operator.cluster.errors import ApiError, ApiUnreachableError
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
        self._lease: Document | None = None
        self._seen: tuple[object, float] | None = None
        """The other holder's record and when it was first seen."""

    async def acquire(self) -> None:
        """Wait until the lease is ours."""
        while True:
            try:
                if await self._try_to_take():
                    return
            except (ApiError, ApiUnreachableError) as error:
                _log.warning("lease not taken", error=str(error))
            await self._sleep(self._timing.retry)

    async def hold(self) -> None:
        """Renew until that has failed for `renew_deadline` or somebody else holds the lease; returning means it is lost."""
        renewed = self._clock()
        while True:
            await self._sleep(self._timing.retry)
            try:
                async with asyncio.timeout(max(self._timing.renew_deadline - (self._clock() - renewed), 0.01)):
                    if not await self._try_to_take():
                        return
                renewed = self._clock()
            except (ApiError, ApiUnreachableError, TimeoutError) as error:
                _log.warning("lease not renewed", error=str(error))
                if self._clock() - renewed >= self._timing.renew_deadline:
                    return

    async def release(self) -> None:
        """Give the lease back, so that a standby need not wait for it to expire."""
        if self._lease is None:
            return
        lease = self._lease | {"spec": self._lease["spec"] | {"holderIdentity": "", "leaseDurationSeconds": 1}}
        try:
            await self._store.replace(lease)
        except (ApiError, ApiUnreachableError) as error:
            _log.warning("lease not released", error=str(error))

    async def _try_to_take(self) -> bool:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        lease = await self._store.read()
        spec: Document = {} if lease is None else dict(lease.get("spec") or {})
        holder = spec.get("holderIdentity") or ""
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
            self._lease = await (self._store.create(changed) if lease is None else self._store.replace(lease | {"spec": changed}))
        except ApiError as error:
            if error.code == 409:
                return False if holder != self._identity else await self._still_ours()
            raise
        return True

    async def _still_ours(self) -> bool:
        """After a lost race for a lease that we held: our own earlier write may have come through without an answer."""
        lease = await self._store.read()
        self._lease = lease
        return lease is not None and (lease.get("spec") or {}).get("holderIdentity") == self._identity

    def _is_expired(self, spec: Document) -> bool:
        record = (spec.get("holderIdentity"), spec.get("renewTime"), spec.get("leaseTransitions"))
        now = self._clock()
        if self._seen is None or self._seen[0] != record:
            self._seen = (record, now)
            return False
        return now - self._seen[1] >= float(spec.get("leaseDurationSeconds") or self._timing.duration)


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
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._main = asyncio.get_running_loop()
        self.held = asyncio.Event()
        """Set in the main loop once the lease is ours."""

    def start(self) -> None:
        """Begin to compete."""
        self._thread.start()

    async def stop(self) -> None:
        """Stop competing, release a held lease and wait for the thread's end."""
        if not self._thread.is_alive():
            return
        if self._loop is not None and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
        await asyncio.to_thread(self._thread.join, 15.0)

    def _run(self) -> None:
        asyncio.run(self._compete())

    async def _compete(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        try:
            elector, close = await self._make_elector()
            try:
                await elector.acquire()
                self._main.call_soon_threadsafe(self.held.set)
                await elector.hold()
                _log.error("lease lost: another replica may work from now on, this one ends")
                self._on_lost()
            except asyncio.CancelledError:
                await elector.release()
            finally:
                await close()
        except asyncio.CancelledError:
            return
        except Exception:  # noqa: BLE001 - whatever it is, nobody renews the lease any more
            _log.exception("lease thread failed: this replica ends")
            self._on_lost()

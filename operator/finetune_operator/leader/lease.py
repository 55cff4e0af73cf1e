"""A small leader elector based on a `coordination.k8s.io` Lease, and access to this Lease on the API server.

Other replicas may take the Lease once its record has not changed for `duration`. Our own requests stop earlier, after
`renew_deadline` without a renewal, so there is always a gap between two holders. The clocks of other replicas are not trusted: a
lease counts as expired if this replica has not seen its record change for its duration.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from finetune_operator.client.answers import ApiError, ApiUnreachableError, Document, NotLeadingError
from finetune_operator.client.api import Api
from finetune_operator.client.kinds import LEASES
from finetune_operator.logs import logger

_log = logger(__name__)


@dataclass(frozen=True)
class LeaseTiming:
    """Times of an election, in seconds."""

    duration: float
    renew_deadline: float
    """Age of our lease at which we stop sending requests; also the time limit of a renewal."""
    retry: float


class Elector:
    """Acquires, renews and releases the lease for one identity."""

    def __init__(
        self,
        store: LeaseObject,
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
        """The Lease as we last wrote it, so that renewals need no read."""
        self._renewed = -math.inf
        """When the last successful renewal was sent, not when its response arrived: other replicas count from the write."""
        self._seen: tuple[object, float] | None = None
        """The record of another holder, and when this replica first saw it."""

    @property
    def age(self) -> float:
        """Seconds since the lease was last certain to be ours; infinite if it never was. May be read from any thread."""
        return self._clock() - self._renewed

    def fence(self) -> None:
        """Raise NotLeadingError unless the lease was renewed so recently that no other replica can hold it. May be called from
        any thread.
        """
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
                # If the answer took longer than `renew_deadline`, another replica may have the lease by now.
                if taken and self.age < self._timing.renew_deadline:
                    return
            except (ApiError, ApiUnreachableError, TimeoutError) as error:
                _log.warning("lease not taken", error=str(error) or "no answer in time")
            await self._sleep(self._timing.retry)

    async def hold(self) -> None:
        """Renew the lease until another replica has taken it. While the API server is unavailable, no replica can take it: the
        fence closes, and opens again with the next successful renewal.
        """
        while True:
            await self._sleep(self._timing.retry)
            try:
                async with asyncio.timeout(self._timing.renew_deadline):
                    if not await self._try_to_renew():
                        return
            except (ApiError, ApiUnreachableError, TimeoutError) as error:
                _log.warning("lease not renewed", error=str(error) or "no answer in time", age_seconds=round(self.age, 1))

    async def release(self) -> None:
        """Release the lease if it is ours, so that a standby need not wait until it expires."""
        self._renewed = -math.inf
        self._lease = None
        try:
            async with asyncio.timeout(self._timing.renew_deadline):
                # Read the lease first: a renewal that was cancelled before its response arrived may still have been written.
                lease = await self._store.read()
                if lease is not None and _holder(lease) == self._identity:
                    spec = lease["spec"] | {"holderIdentity": "", "leaseDurationSeconds": 1}
                    await self._store.replace(lease | {"spec": spec})
        except (ApiError, ApiUnreachableError, TimeoutError) as error:
            _log.warning("lease not released", error=str(error) or "no answer in time")

    async def _try_to_take(self) -> bool:
        started = self._clock()
        lease = await self._store.read()
        holder = "" if lease is None else _holder(lease)
        if lease is not None and holder and holder != self._identity and not self._is_expired(dict(lease.get("spec") or {})):
            return False
        await self._write(lease, started)
        return True

    async def _try_to_renew(self) -> bool:
        started = self._clock()
        if self._lease is not None:
            known, self._lease = self._lease, None
            try:
                await self._write(known, started)
                return True
            except ApiError as error:
                # Either another replica has written the Lease, or we have but the answer was lost, or the Lease was deleted.
                if error.code not in {404, 409}:
                    raise
        lease = await self._store.read()
        if lease is not None and _holder(lease) != self._identity:
            return False
        await self._write(lease, started)
        return True

    async def _write(self, lease: Document | None, started: float) -> None:
        """Write the Lease with us as the holder. Raises an ApiError for the conflict if another replica was faster."""
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        spec: Document = {} if lease is None else dict(lease.get("spec") or {})
        is_renewal = lease is not None and _holder(lease) == self._identity
        changed: Document = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(self._timing.duration),
            "renewTime": now,
            "acquireTime": spec.get("acquireTime", now) if is_renewal else now,
            "leaseTransitions": int(spec.get("leaseTransitions") or 0) + (lease is not None and not is_renewal),
        }
        self._lease = await (self._store.create(changed) if lease is None else self._store.replace(lease | {"spec": changed}))
        self._renewed = started

    def _is_expired(self, spec: Document) -> bool:
        record = (spec.get("holderIdentity"), spec.get("renewTime"), spec.get("leaseTransitions"))
        now = self._clock()
        if self._seen is None or self._seen[0] != record:
            self._seen = (record, now)
            return False
        return now - self._seen[1] >= float(spec.get("leaseDurationSeconds") or self._timing.duration)


def _holder(lease: Document) -> str:
    return str((lease.get("spec") or {}).get("holderIdentity") or "")


class LeaseObject:
    """The Lease object, identified by its namespace and name."""

    def __init__(self, api: Api, namespace: str, name: str) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name

    async def read(self) -> Document | None:
        """Read the Lease; None if it does not exist."""
        return await self._api.get(LEASES, self._namespace, self._name)

    async def create(self, spec: Document) -> Document:
        """Create the Lease. Raises an ApiError for the conflict if it already exists."""
        metadata = {"name": self._name, "namespace": self._namespace}
        body = {"apiVersion": LEASES.api_version, "kind": LEASES.name, "metadata": metadata, "spec": spec}
        return await self._api.create(LEASES, self._namespace, body)

    async def replace(self, lease: Document) -> Document:
        """Replace the Lease. Its resourceVersion is a precondition."""
        return await self._api.replace(LEASES, self._namespace, self._name, lease)

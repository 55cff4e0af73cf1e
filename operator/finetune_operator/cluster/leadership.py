"""The right to work: the release's lease, and its claim to namespaces, taken and renewed in a thread and event loop of their own.

Two releases must not serve the same namespace. A leader first writes its claim and then reads the others', so of two that come
at the same time at least one sees the other and withdraws. The process ends when lease or claim is lost, because a replica
that only believes that it leads would write next to the one that does.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from finetune_operator.cluster.answers import ApiError, ApiUnreachableError, Document, NotLeadingError
from finetune_operator.cluster.lease import Elector
from finetune_operator.logs import logger

CLAIM_LABEL = "finetune.dev/claim"
NAMESPACES_ANNOTATION = "finetune.dev/namespaces"
EVERYWHERE = "*"
LONGEST_LIST = 3
"""Namespaces that a message names."""


def claim_name(release: str) -> str:
    """Name of a release's claim; `release`: namespace and name of its Lease, with a slash."""
    return f"finetune-operator.{release.replace('/', '.')}"


def claim_metadata(namespaces: tuple[str, ...]) -> Document:
    """Labels and annotations of a claim; no namespaces: all."""
    return {"labels": {CLAIM_LABEL: "true"}, "annotations": {NAMESPACES_ANNOTATION: ",".join(namespaces) or EVERYWHERE}}


class RivalReleases:
    """Other releases that serve a namespace of ours."""

    def __init__(
        self,
        read_claims: Callable[[], Awaitable[list[Document]]],
        release: str,
        namespaces: tuple[str, ...],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read_claims = read_claims
        self._release = release
        self._namespaces = namespaces
        self._clock = clock
        self._seen: dict[str, tuple[object, float]] = {}
        """By name: the last record of a claim and when it was first seen. Others' clocks are not trusted."""

    async def find(self) -> str:
        """Why we must not serve, or nothing. A claim counts as living until it has not changed here for its duration."""
        claims = {str(claim["metadata"]["name"]): claim for claim in await self._read_claims()}
        self._seen = {name: seen for name, seen in self._seen.items() if name in claims}
        # Each is looked at each time, so that the time since its last change is known.
        living = [name for name, claim in sorted(claims.items()) if self._is_living(name, claim)]
        for name in living:
            shared = _shared(self._namespaces, _namespaces(claims[name]))
            if shared and name != claim_name(self._release):
                holder = claims[name]["spec"]["holderIdentity"]
                return (
                    f"release {holder} serves {shared} already (claim {name}), and two releases must not serve the same "
                    "namespace: uninstall one of them, or give each its own list of namespaces"
                )
        return ""

    def _is_living(self, name: str, claim: Document) -> bool:
        spec = claim.get("spec") or {}
        if not spec.get("holderIdentity"):
            return False
        record = (spec.get("renewTime"), spec.get("leaseTransitions"), claim["metadata"].get("resourceVersion"))
        now = self._clock()
        if name not in self._seen or self._seen[name][0] != record:
            self._seen[name] = (record, now)
        return now - self._seen[name][1] < float(spec.get("leaseDurationSeconds") or 0)


def _namespaces(claim: Document) -> tuple[str, ...]:
    """What a claim names; nothing that can be read: all."""
    text = str((claim["metadata"].get("annotations") or {}).get(NAMESPACES_ANNOTATION) or EVERYWHERE)
    return () if text == EVERYWHERE else tuple(text.split(","))


def _shared(ours: tuple[str, ...], theirs: tuple[str, ...]) -> str:
    """In words: namespaces of both, or nothing."""
    if not ours and not theirs:
        return "all namespaces"
    shared = sorted(set(ours) & set(theirs)) if ours and theirs else list(ours or theirs)
    more = f" and {len(shared) - LONGEST_LIST} more" if len(shared) > LONGEST_LIST else ""
    return f"namespace {', '.join(shared[:LONGEST_LIST])}{more}" if shared else ""


_log = logger(__name__)


@dataclass(frozen=True)
class Candidacy:
    """What it takes to lead."""

    lease: Elector
    """One replica of the release."""
    claim: Elector
    """One release for a namespace."""
    rivals: RivalReleases
    retry: float
    """Seconds between looks at the rivals."""
    close: Callable[[], Awaitable[None]]

    async def win(self, tell: Callable[[str], None]) -> None:
        """Wait until both are ours. `tell` learns why we may not even stand by, or nothing once we may."""
        while True:
            await self._wait_for_no_rival(tell)
            await self.lease.acquire()
            await self.claim.acquire()
            if not await self._rival():
                return
            # Both came at the same time. Who withdraws comes back at another moment than the other.
            await self.withdraw()
            await asyncio.sleep(self.retry * random.uniform(0.5, 2.0))  # noqa: S311 - no secret

    async def hold(self) -> None:
        """Renew both; returning means that one is lost."""
        holds = [asyncio.create_task(elector.hold()) for elector in (self.lease, self.claim)]
        try:
            await asyncio.wait(holds, return_when=asyncio.FIRST_COMPLETED)
            for hold in holds:
                if hold.done():
                    hold.result()
        finally:
            for hold in holds:
                hold.cancel()
            await asyncio.gather(*holds, return_exceptions=True)

    async def withdraw(self) -> None:
        """Give both back: the lease last, because its holder may write the claim."""
        if math.isfinite(self.claim.age):
            # Not by a replica that stood by: all of a release share the claim.
            await self.claim.release()
        await self.lease.release()

    def fence(self) -> None:
        """Raise NotLeadingError unless both are ours beyond doubt."""
        self.lease.fence()
        self.claim.fence()

    async def _wait_for_no_rival(self, tell: Callable[[str], None]) -> None:
        told = None
        while refusal := await self._rival():
            if refusal != told:
                _log.error("refusing to serve", reason=refusal)
                tell(refusal)
                told = refusal
            await asyncio.sleep(self.retry)
        tell("")

    async def _rival(self) -> str:
        try:
            return await self.rivals.find()
        except (ApiError, ApiUnreachableError) as error:
            return f"the claims of other releases cannot be read: {error}"


class LeadershipThread:
    """Competes next to the main loop. `on_lost` ends the process; a test may give another."""

    def __init__(
        self,
        make_candidacy: Callable[[], Awaitable[Candidacy]],
        tell: Callable[[str], None] = lambda _refusal: None,
        on_lost: Callable[[], None] = lambda: os._exit(1),
    ) -> None:
        self._make_candidacy = make_candidacy
        """Made inside the thread, because connections belong to an event loop."""
        self._tell = tell
        """Called in the main loop with the reason why this release must not serve, or nothing once it may stand by."""
        self._on_lost = on_lost
        self._thread = threading.Thread(target=self._run, name="leadership", daemon=True)
        self._candidacy: Candidacy | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_stopped = threading.Event()
        self._main = asyncio.get_running_loop()
        self.held = asyncio.Event()
        """Set in the main loop once we lead."""

    def fence(self) -> None:
        """Raise NotLeadingError unless we lead beyond doubt. May be called from any thread."""
        if self._candidacy is None:
            raise NotLeadingError("not sent: this replica does not hold the lease")
        self._candidacy.fence()

    def start(self) -> None:
        """Begin to compete."""
        self._thread.start()

    async def stop(self) -> None:
        """Stop competing, give back what is held and wait for the thread's end."""
        self._is_stopped.set()
        if not self._thread.is_alive():
            return
        if self._loop is not None and self._task is not None:
            # It may end by itself between any check here and the call.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._task.cancel)
        await asyncio.to_thread(self._thread.join, 25.0)

    def _run(self) -> None:
        asyncio.run(self._compete())

    async def _compete(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        if self._is_stopped.is_set():
            return
        try:
            self._candidacy = await self._make_candidacy()
            try:
                await self._candidacy.win(lambda refusal: self._in_main(lambda: self._tell(refusal)))
                self._in_main(self.held.set)
                await self._candidacy.hold()
                _log.error("lease lost: another replica may work from now on, this one ends")
                self._on_lost()
            except asyncio.CancelledError:
                await self._candidacy.withdraw()
            finally:
                await self._candidacy.close()
        except asyncio.CancelledError:
            return
        except Exception:  # noqa: BLE001 - whatever it is, nobody renews the lease any more
            _log.exception("lease thread failed: this replica ends")
            self._on_lost()

    def _in_main(self, call: Callable[[], object]) -> None:
        self._main.call_soon_threadsafe(call)

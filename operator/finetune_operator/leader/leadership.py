"""Acquires and renews the release's Lease in a separate thread with its own event loop, so a busy main loop does not lose it.

The process ends when the Lease is lost: a replica that wrongly believes it leads would write alongside the real leader.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress

from finetune_operator.client.answers import NotLeadingError
from finetune_operator.leader.lease import Elector
from finetune_operator.logs import logger

_log = logger(__name__)


class LeadershipThread:
    """Competes for the Lease in parallel with the main loop. `on_lost` ends the process; tests replace it."""

    def __init__(
        self, make_elector: Callable[[], AbstractAsyncContextManager[Elector]], on_lost: Callable[[], None] = lambda: os._exit(1)
    ) -> None:
        self._make_elector = make_elector
        """Returns a context manager that is entered inside the thread, because connections are bound to an event loop."""
        self._on_lost = on_lost
        self._thread = threading.Thread(target=lambda: asyncio.run(self._compete()), name="leadership", daemon=True)
        self._elector: Elector | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_stopped = threading.Event()
        self._main = asyncio.get_running_loop()
        self.held = asyncio.Event()
        """Set in the main loop once we lead."""

    def fence(self) -> None:
        """Raise NotLeadingError unless we are certain to lead. May be called from any thread."""
        if self._elector is None:
            raise NotLeadingError("not sent: this replica does not hold the lease")
        self._elector.fence()

    def start(self) -> None:
        """Start competing for the Lease."""
        self._thread.start()

    async def stop(self) -> None:
        """Stop competing, release the lease and wait until the thread ends."""
        self._is_stopped.set()
        if not self._thread.is_alive():
            return
        if self._loop is not None and self._task is not None:
            # If the loop closes between the checks above and this call, the call raises RuntimeError.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._task.cancel)
        await asyncio.to_thread(self._thread.join, 25.0)

    async def _compete(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        if self._is_stopped.is_set():
            return
        try:
            async with self._make_elector() as elector:
                self._elector = elector
                try:
                    await elector.acquire()
                    self._main.call_soon_threadsafe(self.held.set)
                    await elector.hold()
                    _log.error("lease lost: another replica may lead now, so this one ends")
                    self._on_lost()
                except asyncio.CancelledError:
                    await elector.release()
        except asyncio.CancelledError:
            return
        except Exception:  # noqa: BLE001 - whatever it is, the lease is not renewed any more
            _log.exception("lease thread failed, so this replica ends")
            self._on_lost()

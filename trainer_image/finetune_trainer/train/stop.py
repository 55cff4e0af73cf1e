"""SIGTERM -> a flag that ranks read at step boundaries, where the state is whole."""

from __future__ import annotations

import signal
from types import FrameType


class StopRequest:
    """Set by SIGTERM. Ranks agree on it together with the loss, so none stops in the middle of a collective."""

    def __init__(self) -> None:
        self.requested = False

    def install(self) -> None:
        """Take SIGTERM; call in the main thread."""
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True

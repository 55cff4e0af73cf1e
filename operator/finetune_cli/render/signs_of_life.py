"""Signs of life of a waiting command: whenever nothing was printed for a while, a line says what the command is doing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Self

SILENCE_SECONDS = 30.0
"""Longest time without a line while nothing moves on the screen."""


class SignsOfLife:
    """A context manager that calls `print_line` with what is being done and for how long, after each period of silence.

    A separate thread does this, because the command itself may be blocked while it reads from a pipe.
    """

    def __init__(self, print_line: Callable[[str], None], *, silence_seconds: float = SILENCE_SECONDS) -> None:
        self._print_line, self._silence_seconds = print_line, silence_seconds
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._doing, self._detail = "", ""
        self._since = self._spoken = time.monotonic()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def doing(self, text: str) -> None:
        """Set what is being done from now on; empty: nothing that takes long. The caller has printed a line about this."""
        with self._lock:
            self._doing, self._detail = text, ""
            self._since = self._spoken = time.monotonic()

    def detail(self, text: str) -> None:
        """Set the progress that the next sign of life will mention."""
        with self._lock:
            self._detail = text

    def spoken(self) -> None:
        """Record that a line was printed."""
        with self._lock:
            self._spoken = time.monotonic()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        pause = self._silence_seconds
        while not self._ended.wait(pause):
            line, pause = self._next(time.monotonic())
            if line:
                self._print_line(line)

    def _next(self, now: float) -> tuple[str, float]:
        """Return the line that is due, empty if none is, and the seconds until the next line may be due."""
        with self._lock:
            left = self._spoken + self._silence_seconds - now
            if left > 0:
                return "", left
            self._spoken = now
            if not self._doing:
                return "", self._silence_seconds
            detail = f": {self._detail}" if self._detail else ""
            return f"still {self._doing}, for {now - self._since:.0f} s{detail}", self._silence_seconds

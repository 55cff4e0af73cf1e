"""Signs of life of a command that waits: a line about what it does, whenever nothing was printed for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Self

SILENCE_SECONDS = 30.0
"""Longest time without a line where nothing on the screen moves."""


class SignsOfLife:
    """Calls `print_line` with what is being done and for how long, after each time of silence; as a context manager.

    A thread of its own does it, because what is waited for may be a read of a pipe.
    """

    def __init__(self, print_line: Callable[[str], None], *, silence_seconds: float = SILENCE_SECONDS) -> None:
        self._print_line, self._silence_seconds = print_line, silence_seconds
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._doing, self._detail = "", ""
        self._since = self._spoken = time.monotonic()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def doing(self, text: str) -> None:
        """Note what is being done from now on; empty: nothing that takes long. The caller has printed a line about it."""
        with self._lock:
            self._doing, self._detail = text, ""
            self._since = self._spoken = time.monotonic()

    def detail(self, text: str) -> None:
        """Note the progress, which the next sign of life will say."""
        with self._lock:
            self._detail = text

    def spoken(self) -> None:
        """A line was printed."""
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
        """The line that is due, if one is, and seconds until the next may be."""
        with self._lock:
            left = self._spoken + self._silence_seconds - now
            if left > 0:
                return "", left
            self._spoken = now
            if not self._doing:
                return "", self._silence_seconds
            detail = f": {self._detail}" if self._detail else ""
            return f"still {self._doing}, for {now - self._since:.0f} s{detail}", self._silence_seconds

"""Storages for kopf that keep nothing.

kopf compares every object with its last state, and copies it deeply twice for that, also where no handler of a change is
registered. Only low-level events are used here, so there is nothing to compare: a fifth of the watches' CPU time.
"""

from __future__ import annotations

from typing import Any

import kopf


class NoDiffBase(kopf.DiffBaseStorage):  # type: ignore[misc]
    """Every object looks the same."""

    def build(self, **_: Any) -> Any:
        """Nothing of the object matters."""
        return {}

    def fetch(self, **_: Any) -> Any:
        """There is no last state."""
        return None

    def store(self, **_: Any) -> None:
        """Nothing is kept."""


class NoProgress(kopf.ProgressStorage):  # type: ignore[misc]
    """No handler has a state."""

    def fetch(self, **_: Any) -> Any:
        """There is none."""
        return None

    def store(self, **_: Any) -> None:
        """Nothing is kept."""

    def purge(self, **_: Any) -> None:
        """Nothing is kept."""

    def touch(self, **_: Any) -> None:
        """Nothing is written into any object."""

    def clear(self, *, essence: Any) -> Any:
        """Nothing of ours is in it."""
        return essence

"""What a forward pass is given."""

from __future__ import annotations

from dataclasses import dataclass

LENGTH_MULTIPLE = 8
"""Rows are padded to a multiple of this many tokens: matrix products on tensor cores are fast for such lengths."""


@dataclass(frozen=True)
class Workload:
    """One micro-batch of one rank."""

    rows: int
    length: int
    """Tokens of a row, padding included."""
    has_mask: bool
    """Whether attention needs a mask: rows of several documents, or padded ones."""
    on_gpu: bool

    @property
    def tokens(self) -> int:
        """Of all rows."""
        return self.rows * self.length

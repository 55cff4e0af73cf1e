"""How much memory a rank may take, and sizes in words."""

from __future__ import annotations

from dataclasses import dataclass

KEPT_FREE_PERCENT = 10
"""Of a limit, where memory is taken for speed alone: estimates have been wrong by up to 7 % (docs/explanation/memory.md)."""


@dataclass(frozen=True)
class MemoryLimit:
    """Bytes that one rank may take."""

    bytes: int
    is_device: bool
    """Whether it is a device's memory, beyond which nothing can be allocated."""
    source: str
    """Where it was named."""
    devices: int | None = None
    """How many there are, on the one machine where the job runs; None: nobody has said."""

    def leaves_room_above(self, needed: int) -> bool:
        """Whether so many bytes leave free what is kept free."""
        return 100 * needed <= (100 - KEPT_FREE_PERCENT) * self.bytes


def format_bytes(count: int) -> str:
    """A number of bytes for people: 12.3 GiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"

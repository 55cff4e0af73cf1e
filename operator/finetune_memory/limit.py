"""The limit of the memory that a rank may take, and the format of sizes."""

from __future__ import annotations

from dataclasses import dataclass

KEPT_FREE_PERCENT = 10
"""Percentage that stays free if memory is used only for speed: estimates err by up to 7 % (docs/explanation/memory.md)."""


@dataclass(frozen=True)
class MemoryLimit:
    """Bytes that one rank may take."""

    bytes: int
    is_device: bool
    """Whether the limit is a device's memory, beyond which nothing can be allocated."""
    source: str
    """The setting or device that the limit comes from, in words."""
    devices: int | None = None
    """Number of devices of the one machine where the job runs; None if unknown."""

    @property
    def roomy(self) -> int:
        """Maximum number of bytes that leaves enough of the limit free."""
        return (100 - KEPT_FREE_PERCENT) * self.bytes // 100

    def leaves_room_above(self, needed: int) -> bool:
        """Whether `needed` bytes leave enough of the limit free."""
        return needed <= self.roomy


def format_bytes(count: int) -> str:
    """Format a number of bytes for people, such as 12.3 GiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"

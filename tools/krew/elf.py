"""Reads the headers of a program or shared library (ELF, 64 bits, little-endian)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

_MAGIC = b"\x7fELF\x02\x01"
_LOADED, _DYNAMIC = 1, 2
"""Types of segments."""
_END, _NEEDED, _STRINGS = 0, 1, 5
"""Tags of the dynamic segment."""


@dataclass(frozen=True)
class Program:
    machine: int
    """Machine that it is built for: `e_machine` of ELF."""
    needed: tuple[str, ...]
    """Names of the shared libraries that it needs."""


def read_program(path: Path) -> Program | None:
    """Read a file; None if it is no program or library of this kind."""
    content = path.read_bytes()
    if not content.startswith(_MAGIC):
        return None
    (machine,) = struct.unpack_from("<H", content, 18)
    (segments,) = struct.unpack_from("<Q", content, 32)
    size, count = struct.unpack_from("<HH", content, 54)
    loaded: list[tuple[int, int, int]] = []
    dynamic: list[tuple[int, int]] = []
    for start in range(segments, segments + size * count, size):
        kind, _, offset, address, _, length = struct.unpack_from("<IIQQQQ", content, start)
        if kind == _LOADED:
            loaded.append((address, length, offset))
        elif kind == _DYNAMIC:
            dynamic = list(struct.iter_unpack("<qQ", content[offset : offset + length]))
    entries = dynamic[: next((place for place, (tag, _) in enumerate(dynamic) if tag == _END), 0)]
    strings = next((value for tag, value in entries if tag == _STRINGS), 0)
    table = next((offset + strings - address for address, length, offset in loaded if address <= strings < address + length), 0)
    names = (content[table + value : content.index(b"\0", table + value)] for tag, value in entries if tag == _NEEDED)
    return Program(machine, tuple(name.decode() for name in names))

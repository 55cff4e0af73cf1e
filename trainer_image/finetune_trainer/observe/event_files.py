"""TensorBoard's event files, which every run writes: scalars by step, a file for each attempt.

A file is a sequence of records as TensorFlow's TFRecord frames them, and each holds an Event of TensorBoard's event.proto in the
wire format of protocol buffers. Both have not changed since 2016, and six fields of them are all that scalars need (decision
0030).
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

FOLDER = "tensorboard"
"""Below the directory that trackers are given."""
VERSION = b"brain.Event:2"
_POLYNOMIAL = 0x82F63B78
"""Castagnoli's, its bits in reverse."""
_VARINT, _EIGHT_BYTES, _DELIMITED, _FOUR_BYTES = 0, 1, 2, 5
"""Wire types."""


def crc32c(data: bytes) -> int:
    """Castagnoli's cyclic redundancy check (RFC 3720, appendix B.4)."""
    found = 0xFFFFFFFF
    for byte in data:
        found = _TABLE[(found ^ byte) & 0xFF] ^ (found >> 8)
    return found ^ 0xFFFFFFFF


def record(data: bytes) -> bytes:
    """One record: its length and its content, each followed by a check that is rotated, so that checks can be checked."""
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def version_event(now: float) -> bytes:
    """The first of each file. now: seconds since the epoch, here and below."""
    return _double(1, now) + _delimited(3, VERSION)


def start_event(now: float, step: int) -> bytes:
    """The run begins, or continues, with this step: what earlier files have of it and later ones does not count."""
    started = _varint(1, 1)
    return _double(1, now) + _varint(2, step) + _delimited(7, started)


def scalars_event(now: float, step: int, values: Mapping[str, float]) -> bytes:
    """Scalars of one step, by their names."""
    summary = b"".join(
        _delimited(1, _delimited(1, name.encode()) + struct.pack("<Bf", 2 << 3 | _FOUR_BYTES, _float32(value)))
        for name, value in values.items()
    )
    return _double(1, now) + _varint(2, step) + _delimited(5, summary)


class TensorBoard:
    """A `Tracker` that writes event files."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock

    def start(self, run: Mapping[str, Any]) -> None:
        """Raises OSError."""
        now, folder = self._clock(), Path(run["directory"]) / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self._file = _new_file(folder, int(now), run["attempt"])
        self._write(version_event(now))
        self._write(start_event(now, run["step"] + 1))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Raises OSError."""
        self._write(scalars_event(self._clock(), step, {name: value for name, value in values.items() if name != "attempt"}))

    def finish(self, _outcome: str) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: bytes) -> None:
        self._file.write(record(event))


def _new_file(folder: Path, second: int, attempt: int) -> BinaryIO:
    """TensorBoard reads the files of a directory in the order of their names. What begins in the same second comes after it."""
    while True:
        try:
            return (folder / f"events.out.tfevents.{second:010d}.{socket.gethostname()}.{attempt}").open("xb", buffering=0)
        except FileExistsError:
            second += 1


def _table_entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
    return byte


_TABLE = tuple(_table_entry(byte) for byte in range(256))


def _masked(data: bytes) -> bytes:
    found = crc32c(data)
    return struct.pack("<I", ((found >> 15 | found << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _float32(value: float) -> float:
    """As near as four bytes come; what is too large for them is infinite."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _number(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _varint(field: int, value: int) -> bytes:
    return _number(field << 3 | _VARINT) + _number(value)


def _double(field: int, value: float) -> bytes:
    return _number(field << 3 | _EIGHT_BYTES) + struct.pack("<d", value)


def _delimited(field: int, content: bytes) -> bytes:
    return _number(field << 3 | _DELIMITED) + _number(len(content)) + content

"""JSON Lines -> records, one line at a time, or those of a range of bytes, so that several processes share one file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NoReturn

from finetune_job.api.data import DataFormat
from finetune_trainer.data.records import MAX_RECORD_BYTES, Place, Record, RecordProblem, example, record_of
from finetune_trainer.files import open_regular

_BYTES_AT_ONCE = 2**20


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
"""Made once: json.loads makes a decoder per call where it is given options."""


def read_jsonl(path: Path, data_format: DataFormat, part: tuple[int, int] | None) -> Iterator[Record | RecordProblem]:
    """Every non-blank line that begins in the bytes [start, stop) of `part`; lines are counted from the first of them."""
    start, stop = part or (0, path.stat().st_size)
    with open_regular(path) as file:
        if start > 0:
            file.seek(start - 1)
            _skip_line(file)
        position = file.tell()
        line = 0
        while position < stop:
            encoded = file.readline(MAX_RECORD_BYTES)
            if not encoded:
                return
            line += 1
            place = Place(path, line)
            if len(encoded) == MAX_RECORD_BYTES and not encoded.endswith(b"\n"):
                yield place.problem("", encoded, f"is longer than {MAX_RECORD_BYTES} bytes", "write one JSON object per line")
                _skip_line(file)
                position = file.tell()
                continue
            if position == 0:
                # A byte order mark is no part of the first record.
                position, encoded = len(encoded), encoded.removeprefix(b"\xef\xbb\xbf")
            else:
                position += len(encoded)
            if not encoded.isspace() and encoded:
                yield _parsed(place, encoded, data_format)


def lines_before(path: Path, start: int) -> int:
    """Lines of a JSON Lines file that begin before byte `start`: what to add to a line number of the part that begins there.

    Reads the file up to there, so call it only where a line number is shown.
    """
    lines, left = 0, start
    last = b"\n"
    with open_regular(path) as file:
        while left > 0 and (block := file.read(min(_BYTES_AT_ONCE, left))):
            lines, left, last = lines + block.count(b"\n"), left - len(block), block[-1:]
    return lines if last == b"\n" else lines + 1


def _skip_line(file: BinaryIO) -> None:
    """Up to and with the next line end."""
    while (rest := file.readline(_BYTES_AT_ONCE)) and not rest.endswith(b"\n"):
        pass


def _parsed(place: Place, encoded: bytes, data_format: DataFormat) -> Record | RecordProblem:
    try:
        value = DECODER.decode(encoded.decode())
    except UnicodeDecodeError as error:
        return place.problem("", encoded, f"is not UTF-8 ({error.reason})", "save the file as UTF-8")
    except (ValueError, RecursionError) as error:
        return place.problem("", encoded, f"is not JSON ({error})", f"write one JSON object per line: {example(data_format)}")
    return record_of(place, value, data_format)

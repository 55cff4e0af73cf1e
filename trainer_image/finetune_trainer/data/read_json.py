"""Reads records from JSON Lines and JSON lists, one at a time, so that memory holds the longest record, not the whole file.

JSON Lines can be read in byte ranges, so that several processes can share a file.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NoReturn

from finetune_job.api.inputs import DataFormat
from finetune_job.plan.mapping import MappingPlan
from finetune_trainer.data.parse import record_of
from finetune_trainer.data.records import MAX_RECORD_BYTES, Record, RecordPosition, RecordProblem, Unit, example
from finetune_trainer.files import open_regular

_BLOCK_BYTES = 2**20
"""Number of bytes of JSON Lines that are read at a time."""
UNIT: Unit = "record"
_BYTES_AT_ONCE = 2**18
"""Number of bytes of a JSON list that are read at a time."""
_BLANK = " \t\n\r"
_STRUCTURE = re.compile(r'[\[\]{}"]|,')
_STRING_END = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*(?P<end>")?', re.DOTALL)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
"""A shared decoder, because json.loads with options would create a new one for each call."""


def read_jsonl(
    path: Path, data_format: DataFormat, part: tuple[int, int] | None, mapping: MappingPlan
) -> Iterator[Record | RecordProblem]:
    """Yield the record of every non-blank line that begins in the byte range `part`. Line numbers count from 1 in this range."""
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
            place = RecordPosition(path, line)
            if len(encoded) == MAX_RECORD_BYTES and not encoded.endswith(b"\n"):
                yield place.problem("", encoded, f"is longer than {MAX_RECORD_BYTES} bytes", "write one JSON object per line")
                _skip_line(file)
                position = file.tell()
                continue
            if position == 0:
                # A byte order mark is not part of the first record.
                position, encoded = len(encoded), encoded.removeprefix(b"\xef\xbb\xbf")
            else:
                position += len(encoded)
            if not encoded.isspace() and encoded:
                yield _parsed(place, encoded, data_format, mapping)


def lines_before(path: Path, start: int) -> int:
    """Number of lines that begin before byte `start` of a JSON Lines file: add it to line numbers in a part that begins there.

    This reads the file up to `start`, so call it only for a line number that is shown.
    """
    lines, left = 0, start
    last = b"\n"
    with open_regular(path) as file:
        while left > 0 and (block := file.read(min(_BLOCK_BYTES, left))):
            lines, left, last = lines + block.count(b"\n"), left - len(block), block[-1:]
    return lines if last == b"\n" else lines + 1


def _skip_line(file: BinaryIO) -> None:
    """Read to the end of the current line."""
    while (rest := file.readline(_BLOCK_BYTES)) and not rest.endswith(b"\n"):
        pass


def read_json(path: Path, data_format: DataFormat, mapping: MappingPlan) -> Iterator[Record | RecordProblem]:
    """Yield the record of every element of the list, or its problem. Reading stops early only if the list itself is malformed."""
    wanted = f"write a list of records: [{example(data_format, mapping)}, ...]"
    with open_regular(path) as file:
        window = _Window(file)
        mark = window.next_mark()
        if mark and mark != "[":
            fix = f"{wanted}; a file with one object per line is named .jsonl"
            reason = "the file does not begin with [, so it is not a JSON list"
            yield RecordPosition(path, 1, UNIT).problem("", window.text, reason, fix)
        if mark != "[":
            return
        window.position += 1
        number = 0
        if window.next_mark() == "]":
            window.position += 1
            mark = "]"
        while mark != "]":
            number += 1
            place = RecordPosition(path, number, UNIT)
            if not window.next_mark():
                yield place.problem("", "", "the file ends before the list does", "write the file again, it was cut off")
                return
            end, reason = _end_of_element(window)
            element = window.text[window.position : end]
            if reason:
                yield place.problem("", element, reason, "write the file again, it was cut off")
                return
            window.position = end
            yield _parsed(place, element, data_format, mapping)
            mark = window.next_mark()
            window.position += 1
            if mark not in ("]", ","):
                successor = f"is followed by {mark!r}" if mark else "is followed by the end of the file"
                yield place.problem("", element, f"{successor}, not by a comma or the end of the list", wanted)
                return
        if window.next_mark():
            rest = window.text[window.position :]
            yield RecordPosition(path, number, UNIT).problem("", rest, "the file continues after the end of its list", wanted)


class _Window:
    """The part of the file that is in memory. Text is added at the end and dropped at the beginning."""

    def __init__(self, file: BinaryIO) -> None:
        # A byte that is not UTF-8 becomes a lone surrogate, which makes only its own record invalid.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")
        self._file = file
        self.text = ""
        self.position = 0
        self.is_at_end = False
        self.grow()
        self.text = self.text.removeprefix("\ufeff")

    def grow(self) -> None:
        """Read the next block and drop the text before `position`."""
        # Doubling the window limits how often a long element is copied and scanned.
        block = self._file.read(max(_BYTES_AT_ONCE, len(self.text) - self.position))
        self.is_at_end = not block
        self.text = self.text[self.position :] + self._decoder.decode(block, final=self.is_at_end)
        self.position = 0

    def next_mark(self) -> str:
        """Return the next character that is not blank, or an empty text at the end of the file."""
        while True:
            rest = len(self.text)
            while self.position < rest and self.text[self.position] in _BLANK:
                self.position += 1
            if self.position < rest:
                return self.text[self.position]
            if self.is_at_end:
                return ""
            self.grow()


def _parsed(place: RecordPosition, encoded: bytes | str, data_format: DataFormat, mapping: MappingPlan) -> Record | RecordProblem:
    try:
        value = DECODER.decode(encoded.decode() if isinstance(encoded, bytes) else encoded)
    except UnicodeDecodeError:
        return place.not_utf8("", encoded if isinstance(encoded, bytes) else encoded.encode())
    except (ValueError, RecursionError) as error:
        form = "one JSON object per line: " if place.unit == "line" else ""
        return place.problem("", encoded, f"is not JSON ({error})", f"write {form}{example(data_format, mapping)}")
    return record_of(place, value, data_format, mapping)


def _end_of_element(window: _Window) -> tuple[int, str]:
    """Find the end of the element at `window.position` by brackets and quotes alone. Return it, or the reason why there is none.

    This way, the next element is found even if there is a mistake in this one.
    """
    depth, at, quote = 0, window.position, -1
    while True:
        if quote < 0:
            structure = _STRUCTURE.search(window.text, at)
            if structure is not None:
                mark, at = structure.group(), structure.end()
                if mark == '"':
                    quote = at
                elif mark in "[{":
                    depth += 1
                elif depth == 0:  # a comma or the end of the list
                    return structure.start(), ""
                elif mark != ",":
                    depth -= 1
                    if depth == 0:
                        return at, ""
                continue
            at = len(window.text)
        else:
            string_end = _STRING_END.match(window.text, quote)
            if string_end is not None and string_end.group("end"):
                at, quote = string_end.end(), -1
                continue
        if window.is_at_end:
            return len(window.text), "the file ends within the record"
        if len(window.text) - window.position > MAX_RECORD_BYTES:
            return len(window.text), f"is longer than {MAX_RECORD_BYTES} characters, or a bracket or quote in it is not closed"
        shift = window.position
        window.grow()
        at, quote = at - shift, quote - shift if quote >= 0 else -1

"""A JSON list -> records, one element at a time: memory is bounded by the longest element, not by the file."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from finetune_job.api.data import DataFormat
from finetune_trainer.data.read_jsonl import DECODER
from finetune_trainer.data.records import MAX_RECORD_BYTES, Place, Record, RecordProblem, example, record_of
from finetune_trainer.files import open_regular

UNIT = "record"
_BYTES_AT_ONCE = 2**18
_BLANK = " \t\n\r"
_STRUCTURE = re.compile(r'[\[\]{}"]|,')
_STRING_END = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*(?P<end>")?', re.DOTALL)


def read_json(path: Path, data_format: DataFormat) -> Iterator[Record | RecordProblem]:
    """Every element of the list. One that is wrong in itself is skipped; where the list itself breaks, reading ends."""
    with open_regular(path) as file:
        yield from _elements(_Window(file), path, data_format)


class _Window:
    """The part of the file that is looked at: grows at the end, is cut at the beginning."""

    def __init__(self, file: BinaryIO) -> None:
        # A byte that is not UTF-8 becomes a lone surrogate, which spoils the one record that holds it and not the file.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")
        self._file = file
        self.text = ""
        self.position = 0
        self.is_at_end = False
        self.grow()
        self.text = self.text.removeprefix("\ufeff")

    def grow(self) -> None:
        """Read on, and forget what lies before `position`."""
        # As much again as is held: an element of any length is copied and looked at a bounded number of times.
        block = self._file.read(max(_BYTES_AT_ONCE, len(self.text) - self.position))
        self.is_at_end = not block
        self.text = self.text[self.position :] + self._decoder.decode(block, final=self.is_at_end)
        self.position = 0

    def next_mark(self) -> str:
        """The next character that is not blank, or an empty text at the end of the file."""
        while True:
            rest = len(self.text)
            while self.position < rest and self.text[self.position] in _BLANK:
                self.position += 1
            if self.position < rest:
                return self.text[self.position]
            if self.is_at_end:
                return ""
            self.grow()


def _elements(window: _Window, path: Path, data_format: DataFormat) -> Iterator[Record | RecordProblem]:
    wanted = f"write a list of records: [{example(data_format)}, ...]"
    mark = window.next_mark()
    if not mark:
        return
    if mark != "[":
        fix = f"{wanted}; a file with one object per line is named .jsonl"
        yield Place(path, 1, UNIT).problem("", window.text, "the file does not begin with [, so it is not a JSON list", fix)
        return
    window.position += 1
    number = 0
    if window.next_mark() == "]":
        window.position += 1
    else:
        while True:
            number += 1
            place = Place(path, number, UNIT)
            if not window.next_mark():
                yield place.problem("", "", "the file ends before the list does", "write the file anew, it was cut off")
                return
            end, reason = _end_of_element(window)
            element = window.text[window.position : end]
            if reason:
                yield place.problem("", element, reason, "write the file anew, it was cut off")
                return
            window.position = end
            yield _parsed(place, element, data_format)
            mark = window.next_mark()
            window.position += 1
            if mark == "]":
                break
            if mark != ",":
                found = f"is followed by {mark!r}" if mark else "is followed by the end of the file"
                yield place.problem("", element, f"{found}, not by a comma or the end of the list", wanted)
                return
    if window.next_mark():
        rest = window.text[window.position :]
        yield Place(path, number, UNIT).problem("", rest, "the file goes on after the end of its list", wanted)


def _parsed(place: Place, element: str, data_format: DataFormat) -> Record | RecordProblem:
    try:
        value = DECODER.decode(element)
    except (ValueError, RecursionError) as error:
        return place.problem("", element, f"is not JSON ({error})", f"write {example(data_format)}")
    return record_of(place, value, data_format)


def _end_of_element(window: _Window) -> tuple[int, str]:
    """Where the element at `window.position` ends, and why it does not, by its brackets and quotes alone: so that a mistake
    within an element does not hide where the next begins.
    """
    depth, at, quote = 0, window.position, -1
    while True:
        if quote < 0:
            found = _STRUCTURE.search(window.text, at)
            if found is not None:
                mark, at = found.group(), found.end()
                if mark == '"':
                    quote = at
                elif mark in "[{":
                    depth += 1
                elif depth == 0:  # a comma or the end of the list
                    return found.start(), ""
                elif mark != ",":
                    depth -= 1
                    if depth == 0:
                        return at, ""
                continue
            at = len(window.text)
        else:
            ended = _STRING_END.match(window.text, quote)
            if ended is not None and ended.group("end"):
                at, quote = ended.end(), -1
                continue
        if window.is_at_end:
            return len(window.text), "the file ends within the record"
        if len(window.text) - window.position > MAX_RECORD_BYTES:
            return len(window.text), f"is longer than {MAX_RECORD_BYTES} characters, or a bracket or quote in it is not closed"
        shift = window.position
        window.grow()
        at, quote = at - shift, quote - shift if quote >= 0 else -1

"""CSV with a header row -> records, one row at a time. A chat has no place in a table of texts and is not read."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import partial
from io import TextIOWrapper
from pathlib import Path

from finetune_job.api.data import DataFormat
from finetune_trainer.data.records import KEYS, MAX_RECORD_BYTES, Place, Record, RecordProblem, missing_key, record_of
from finetune_trainer.files import open_regular

_QUOTING = 'quote a value that holds commas, quotes or line breaks with ", and double each " in it'


def read_csv(path: Path, data_format: DataFormat) -> Iterator[Record | RecordProblem]:
    """Every row after the header. The line of a row is the one on which it begins."""
    if data_format is DataFormat.CHAT:
        fix = "write the chats as JSON Lines (.jsonl) or Parquet"
        yield Place(path, 1).problem("messages", path.name, "a CSV file cannot hold chats, whose turns are lists", fix)
        return
    csv.field_size_limit(MAX_RECORD_BYTES)
    # A byte that is not UTF-8 becomes a lone surrogate, which spoils the one record that holds it and not the file.
    with TextIOWrapper(open_regular(path), "utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(iter(partial(file.readline, MAX_RECORD_BYTES), ""), strict=True)
        header: list[str] | None = None
        while True:
            place = Place(path, reader.line_num + 1)
            try:
                row = next(reader, None)
            except csv.Error as error:
                yield place.problem("", f"row at line {place.line}", f"is not CSV ({error})", _QUOTING)
                if header is None:
                    return
                continue
            if row is None:
                return
            if not row:
                continue
            if header is None:
                header = [name.strip() for name in row]
                problem = _header_problem(place, header, data_format)
                if problem is not None:
                    yield problem
                    return
            elif len(row) != len(header):
                yield place.problem("", ",".join(row), f"has {len(row)} values, the header has {len(header)}", _QUOTING)
            else:
                yield record_of(place, dict(zip(header, row, strict=True)), data_format)


def _header_problem(place: Place, header: list[str], data_format: DataFormat) -> RecordProblem | None:
    for key in KEYS[data_format]:
        if key not in header:
            return missing_key(place, key, dict.fromkeys(header), data_format)
        if header.count(key) > 1:
            return place.problem(key, ",".join(header), "is the name of more than one column", "name each column once")
    return None

"""Reads records from tables (CSV with a header row, Parquet and Arrow), a few rows at a time."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from finetune_job.api.inputs import DataFormat
from finetune_job.plan.mapping import MappingPlan
from finetune_trainer.data.other_keys import MEDIA
from finetune_trainer.data.padding import without_nulls
from finetune_trainer.data.parse import columns_to_read, missing_key, record_of, required_keys
from finetune_trainer.data.records import MAX_RECORD_BYTES, PREFERENCES, Record, RecordPosition, RecordProblem, Unit
from finetune_trainer.data.suggestions import suggest_for_table
from finetune_trainer.files import open_regular

_QUOTING = 'quote a value that holds commas, quotes or line breaks with ", and double each " in it'
_OTHER_DELIMITERS = (";", "\t", "|")
_ROW_UNIT: Unit = "row"
_ROWS_AT_ONCE = 256
_ROWS_WITH_MEDIA = 8
"""Number of rows that are read at a time if they hold pictures, video or sound."""
_BUFFER_BYTES = 2**20
_ARROW_FILE = b"ARROW1"
"""First bytes of an Arrow file; an Arrow stream begins differently."""


def read_csv(path: Path, data_format: DataFormat, mapping: MappingPlan) -> Iterator[Record | RecordProblem]:
    """Yield the record of every row after the header. The line number of a row is that of its first line."""
    csv.field_size_limit(MAX_RECORD_BYTES)
    # A byte that is not UTF-8 becomes a lone surrogate, which makes only its own record invalid.
    with TextIOWrapper(open_regular(path), "utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(iter(partial(file.readline, MAX_RECORD_BYTES), ""), strict=True)
        header: list[str] | None = None
        while True:
            place = RecordPosition(path, reader.line_num + 1)
            try:
                row = next(reader, None)
            except csv.Error as error:
                yield place.problem("", f"row at line {place.line}", f"is not CSV ({error})", _QUOTING, is_of_source=True)
                if header is None:
                    return
                continue
            if row is None:
                return
            if not row:
                continue
            if header is None:
                header = [name.strip() for name in row]
                problem = _header_problem(place, header, data_format, mapping)
                if problem is not None:
                    yield replace(problem, is_of_source=True)
                    return
            elif len(row) != len(header):
                reason = f"has {len(row)} values, the header has {len(header)}"
                # A quoting mistake may have swallowed the following lines.
                has_lines = reader.line_num > place.line
                yield place.problem("", ",".join(row), reason, _QUOTING, is_of_source=has_lines)
            else:
                yield record_of(place, dict(zip(header, row, strict=True)), data_format, mapping)


def _header_problem(
    place: RecordPosition, header: list[str], data_format: DataFormat, mapping: MappingPlan
) -> RecordProblem | None:
    columns = dict.fromkeys(header)
    if data_format is DataFormat.CHAT and not mapping.chat_of_pair:
        reason = "a CSV file cannot hold chats, whose turns are lists"
        problem = place.problem("messages", f"columns {sorted(columns)}", reason, suggest_for_table(columns))
        return replace(problem, are_preferences=all(name in columns for name in PREFERENCES))
    for key in required_keys(data_format, mapping):
        if key not in columns:
            problem = missing_key(place, key, columns, data_format, mapping)
            return problem if problem.changes or problem.are_preferences else _no_header(header, problem)
        if header.count(key) > 1:
            return place.problem(key, ",".join(header), "is the name of more than one column", "name each column once")
    return None


def _no_header(header: list[str], problem: RecordProblem) -> RecordProblem:
    """The problem that the first line does not name the columns."""
    delimiter = next((mark for mark in _OTHER_DELIMITERS if len(header) == 1 and mark in header[0]), None)
    if delimiter is not None:
        reason = f"is missing: the values are separated by {delimiter!r}, but a CSV file separates them by commas"
        return replace(problem, reason=reason, fix="save the file with commas between the values")
    reason = f"is missing: the first line of a CSV file names its columns, and this one holds {', '.join(map(repr, header[:4]))}"
    return replace(problem, reason=reason, fix=f"write the names of the columns into the first line, {problem.key} among them")


def read_parquet(path: Path, data_format: DataFormat, mapping: MappingPlan) -> Iterator[Record | RecordProblem]:
    """Yield the record of every row. In chats, nulls are dropped: turns share their columns, so a null means a missing key."""
    # Imported here because the import is slow, and most data is JSON.
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    rows = _Rows(path, data_format, mapping)
    try:
        # Without pre_buffer, which would hold a row group, possibly the whole file, in memory.
        with open_regular(path) as opened, pq.ParquetFile(opened, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
            columns = columns_to_read(data_format, mapping, file.schema_arrow.names)
            # If a required column is missing, one row is read to show what the columns hold.
            at_once = 1 if not columns else _ROWS_WITH_MEDIA if MEDIA.intersection(columns) else _ROWS_AT_ONCE
            batches = file.iter_batches(at_once, columns=columns or None, use_threads=False)
            yield from rows.records(batches, columns, file.schema_arrow.names)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        yield rows.broken("Parquet", error)


def read_arrow(path: Path, data_format: DataFormat, mapping: MappingPlan) -> Iterator[Record | RecordProblem]:
    """Yield the record of every row of a file saved by the datasets library: an Arrow stream or an Arrow file (Feather)."""
    import pyarrow as pa

    rows = _Rows(path, data_format, mapping)
    try:
        with open_regular(path) as opened:
            is_file = opened.read(len(_ARROW_FILE)) == _ARROW_FILE
            opened.seek(0)
            reader = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(opened)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches)) if is_file else reader
            columns = columns_to_read(data_format, mapping, reader.schema.names)
            yield from rows.records(batches, columns, reader.schema.names)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        yield rows.broken("Arrow", error)


class _Rows:
    """Reads and counts the rows of a columnar file."""

    def __init__(self, path: Path, data_format: DataFormat, mapping: MappingPlan) -> None:
        self._path, self._format, self._mapping = path, data_format, mapping
        self._number = 0

    def records(self, batches: Iterable[Any], columns: list[str], names: list[str]) -> Iterator[Record | RecordProblem]:
        """batches: of type pyarrow.RecordBatch. columns: the columns to read; empty if a required column is missing."""
        if not columns:
            first = next((batch.slice(0, 1).to_pylist() for batch in batches if batch.num_rows), [dict.fromkeys(names)])[0]
            missing = next(key for key in required_keys(self._format, self._mapping) if key not in names)
            yield missing_key(
                RecordPosition(self._path, 1, _ROW_UNIT), missing, without_nulls(first), self._format, self._mapping
            )
            return
        not_read = [name for name in names if name not in columns]
        for batch in batches:
            for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                for row in batch.select(columns).slice(start, _ROWS_AT_ONCE).to_pylist():
                    self._number += 1
                    value = without_nulls(row) if self._format is DataFormat.CHAT else row
                    place = RecordPosition(self._path, self._number, _ROW_UNIT)
                    yield record_of(place, value, self._format, self._mapping, not_read)

    def broken(self, kind: str, error: Exception) -> RecordProblem:
        """The problem of a file that cannot be read to its end."""
        place = RecordPosition(self._path, self._number + 1, _ROW_UNIT)
        return place.problem("", self._path.name, f"the file cannot be read further ({error})", f"write the {kind} file again")

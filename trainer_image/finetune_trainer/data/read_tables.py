"""Tables, CSV with a header row and Parquet -> records, a few rows at a time."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from finetune_job.api.inputs import DataFormat
from finetune_trainer.data.records import (
    KEYS,
    MAX_RECORD_BYTES,
    TOOLS,
    Record,
    RecordPosition,
    RecordProblem,
    missing_key,
    record_of,
)
from finetune_trainer.files import open_regular

_QUOTING = 'quote a value that holds commas, quotes or line breaks with ", and double each " in it'
_ROW_UNIT = "row"
_ROWS_AT_ONCE = 256
_BUFFER_BYTES = 2**20


def read_csv(path: Path, data_format: DataFormat) -> Iterator[Record | RecordProblem]:
    """Every row after the header. The line of a row is the one on which it begins."""
    if data_format is DataFormat.CHAT:
        fix = "write the chats as JSON Lines (.jsonl) or Parquet"
        yield RecordPosition(path, 1).problem("messages", path.name, "a CSV file cannot hold chats, whose turns are lists", fix)
        return
    csv.field_size_limit(MAX_RECORD_BYTES)
    # A byte that is not UTF-8 becomes a lone surrogate, which spoils the one record that holds it and not the file.
    with TextIOWrapper(open_regular(path), "utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(iter(partial(file.readline, MAX_RECORD_BYTES), ""), strict=True)
        header: list[str] | None = None
        while True:
            place = RecordPosition(path, reader.line_num + 1)
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


def _header_problem(place: RecordPosition, header: list[str], data_format: DataFormat) -> RecordProblem | None:
    for key in KEYS[data_format]:
        if key not in header:
            return missing_key(place, key, dict.fromkeys(header), data_format)
        if header.count(key) > 1:
            return place.problem(key, ",".join(header), "is the name of more than one column", "name each column once")
    return None


def read_parquet(path: Path, data_format: DataFormat) -> Iterator[Record | RecordProblem]:
    """Every row. A null within a turn of a chat is an absent key: all turns share their columns."""
    # Takes long to load, and most data is JSON.
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    number = 0
    try:
        # Buffered and not read ahead: else a row group, which may be the whole file, is held in memory.
        with open_regular(path) as opened, pq.ParquetFile(opened, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
            names = file.schema_arrow.names
            for key in KEYS[data_format]:
                if key not in names:
                    yield missing_key(RecordPosition(path, 1, _ROW_UNIT), key, dict.fromkeys(names), data_format)
                    return
            optional = [TOOLS] if data_format is DataFormat.CHAT and TOOLS in names else []
            columns = [*KEYS[data_format], *optional]
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=columns, use_threads=False):
                values = [batch.column(column).to_pylist() for column in columns]
                for row in zip(*values, strict=True):
                    number += 1
                    value = dict(zip(columns, row, strict=True))
                    yield record_of(RecordPosition(path, number, _ROW_UNIT), _without_nulls(value, optional), data_format)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        place = RecordPosition(path, number + 1, _ROW_UNIT)
        yield place.problem("", path.name, f"the file cannot be read on ({error})", "write the Parquet file again")


def _without_nulls(value: dict[str, Any], optional: list[str]) -> dict[str, Any]:
    return {key: _turns(each) if key in ("messages", *optional) else each for key, each in value.items()}


def _turns(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _turns(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_turns(each) for each in value]
    return value

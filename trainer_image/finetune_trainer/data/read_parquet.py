"""Parquet -> records, a few rows and only the format's columns at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune_job.api.data import DataFormat
from finetune_trainer.data.records import KEYS, TOOLS, Place, Record, RecordProblem, missing_key, record_of
from finetune_trainer.files import open_regular

UNIT = "row"
_ROWS_AT_ONCE = 256
_BUFFER_BYTES = 2**20


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
                    yield missing_key(Place(path, 1, UNIT), key, dict.fromkeys(names), data_format)
                    return
            optional = [TOOLS] if data_format is DataFormat.CHAT and TOOLS in names else []
            columns = [*KEYS[data_format], *optional]
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=columns, use_threads=False):
                values = [batch.column(column).to_pylist() for column in columns]
                for row in zip(*values, strict=True):
                    number += 1
                    value = dict(zip(columns, row, strict=True))
                    yield record_of(Place(path, number, UNIT), _without_nulls(value, optional), data_format)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        place = Place(path, number + 1, UNIT)
        yield place.problem("", path.name, f"the file cannot be read on ({error})", "write the Parquet file anew")


def _without_nulls(value: dict[str, Any], optional: list[str]) -> dict[str, Any]:
    return {key: _turns(each) if key in ("messages", *optional) else each for key, each in value.items()}


def _turns(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _turns(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_turns(each) for each in value]
    return value

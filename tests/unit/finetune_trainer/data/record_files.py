"""The same records as files of each kind."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

PAIRS = [
    {"prompt": "p\nwith, a comma", "completion": 'said "so"\r\n'},
    {"prompt": "", "completion": "größer 😀"},
    {"prompt": "] [ } {", "completion": '\\" ], "', "id": "7"},
]
CHATS = [
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "tools": None},
    {
        "messages": [
            {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "2"},
        ],
        "tools": [{"function": {"name": "add"}}],
    },
]


def write(path: Path, records: list[dict]) -> Path:
    """`records` as a file of the kind that the name of `path` says."""
    match path.suffix:
        case ".json":
            path.write_text(json.dumps(records, indent=2, ensure_ascii=False))
        case ".csv":
            names = list(dict.fromkeys(name for record in records for name in record))
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, names)
                writer.writeheader()
                writer.writerows(records)
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(records), path, row_group_size=2)
        case _:
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path

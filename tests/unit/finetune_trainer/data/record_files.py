"""The same records as files of each kind."""

import csv
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from finetune_trainer.data.records import Record

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


class StartsWith(str):
    """Equal to what begins with it."""

    __slots__ = ()

    def __eq__(self, other):
        return other.startswith(str(self))

    __hash__ = str.__hash__


def said(item):
    return item.completion if isinstance(item, Record) else f"{item.line}: {item.reason}"


def contents(items):
    """Records without their places."""
    items = list(items)
    assert all(isinstance(item, Record) for item in items), items
    return [(item.prompt, item.completion, item.messages, item.tools) for item in items]

"""Reads records from plain text, one paragraph or line at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from finetune_job.api.inputs import DataFormat, TextUnit
from finetune_job.plan.mapping import MappingPlan
from finetune_trainer.data.parse import record_of
from finetune_trainer.data.records import MAX_RECORD_BYTES, Record, RecordPosition, RecordProblem, Suggestion
from finetune_trainer.files import open_regular


def read_text(path: Path, data_format: DataFormat, mapping: MappingPlan) -> Iterator[Record | RecordProblem]:
    """Yield a record for every paragraph, or for every line that is not blank. A paragraph is numbered by its first line."""
    if data_format is not DataFormat.TEXT:
        fix = Suggestion(
            "set spec.data.format: Text, or name a file of JSON Lines .jsonl", {"spec.data.format": DataFormat.TEXT.value}
        )
        reason = f"a .txt file holds text alone, and records of format {data_format} have parts"
        yield RecordPosition(path, 1).problem("", path.name, reason, fix, is_of_source=True)
        return
    lines: list[bytes] = []
    first_line = 0
    with open_regular(path) as file:
        for number, line in enumerate(iter(partial(file.readline, MAX_RECORD_BYTES), b""), 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                first_line = first_line or number
                lines.append(line)
            if lines and (not line.strip() or mapping.text_unit is TextUnit.LINE or sum(map(len, lines)) >= MAX_RECORD_BYTES):
                yield _record(path, first_line, lines, mapping)
                lines, first_line = [], 0
    if lines:
        yield _record(path, first_line, lines, mapping)


def _record(path: Path, line: int, lines: list[bytes], mapping: MappingPlan) -> Record | RecordProblem:
    place, encoded = RecordPosition(path, line), b"".join(lines)
    if len(encoded) >= MAX_RECORD_BYTES:
        fix = Suggestion("set spec.data.mapping.textUnit: Line, or put blank lines between the texts")
        return place.problem("", encoded, f"is longer than {MAX_RECORD_BYTES} bytes", fix)
    try:
        text = encoded.decode().strip("\r\n")
    except UnicodeDecodeError:
        return place.not_utf8("", encoded)
    return record_of(place, {mapping.text: text}, DataFormat.TEXT, mapping)

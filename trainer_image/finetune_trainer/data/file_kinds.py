"""Recognises files that cannot be read as records: compressed files, and formats of other programs. Called by read.py."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from finetune_trainer.data.records import RecordPosition, RecordProblem
from finetune_trainer.files import open_regular

_PACKED: Mapping[str, tuple[re.Pattern[bytes], str]] = {
    ".gz": (re.compile(rb"\x1f\x8b"), "gunzip"),
    ".zst": (re.compile(rb"\x28\xb5\x2f\xfd"), "unzstd"),
    ".bz2": (re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"), "bunzip2"),
    ".xz": (re.compile(rb"\xfd7zXZ\x00"), "unxz"),
    ".zip": (re.compile(rb"PK\x03\x04"), "unzip"),
}
"""Suffix -> pattern of the first bytes, and the program that decompresses the file. "BZh" alone could also be plain text."""
_MARK_BYTES = 10
"""Number of bytes that the longest pattern in _PACKED matches."""
_TO_CSV = "save it as CSV with commas, with the names of the columns in the first line, in a file named .csv"
_TO_TEXT = "copy plain text into a file named .txt and set spec.data.format: Text, or write JSON Lines (.jsonl)"
_OTHER: Mapping[str, str] = {
    **dict.fromkeys((".tsv", ".xlsx", ".xls", ".ods"), _TO_CSV),
    **dict.fromkeys((".md", ".rst", ".pdf", ".docx", ".html", ".htm"), _TO_TEXT),
    **dict.fromkeys((".yaml", ".yml", ".xml", ".toml", ".pkl", ".pickle", ".npy", ".tar"), "write JSON Lines (.jsonl)"),
}
"""Suffix of a file that cannot be read -> what to do instead."""


def kind_problem(path: Path, kinds: Sequence[str]) -> RecordProblem | None:
    """The reason why the file holds no readable records, judged by its name and first bytes; None if it may hold some.

    kinds: suffixes of the files that can be read.
    """
    place, suffix = RecordPosition(path, 1), path.suffix.lower()
    if suffix in _OTHER:
        return place.problem("", path.name, f"{suffix} files are not read; records must be in {', '.join(kinds)}", _OTHER[suffix])
    with open_regular(path) as file:
        begin = file.read(_MARK_BYTES)
    for end, (mark, program) in _PACKED.items():
        if suffix == end or (suffix != ".parquet" and mark.match(begin)):
            return place.problem("", path.name, "the file is compressed", f"decompress it: {program} {path.name}")
    return None

"""Files of records that are not read as they are: compressed ones, and kinds that other programs write. Called by read.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from finetune_trainer.data.records import RecordPosition, RecordProblem
from finetune_trainer.files import open_regular

_PACKED: Mapping[str, tuple[bytes, str]] = {
    ".gz": (b"\x1f\x8b", "gunzip"),
    ".zst": (b"\x28\xb5\x2f\xfd", "unzstd"),
    ".bz2": (b"BZh", "bunzip2"),
    ".xz": (b"\xfd7zXZ\x00", "unxz"),
    ".zip": (b"PK\x03\x04", "unzip"),
}
"""How such a file begins, and what decompresses it."""
_TO_CSV = "save it as CSV with commas, with the names of the columns in the first line, in a file named .csv"
_TO_TEXT = "copy plain text into a file named .txt and set spec.data.format: Text, or write JSON Lines (.jsonl)"
_OTHER: Mapping[str, str] = {
    **dict.fromkeys((".tsv", ".xlsx", ".xls", ".ods"), _TO_CSV),
    **dict.fromkeys((".md", ".rst", ".pdf", ".docx", ".html", ".htm"), _TO_TEXT),
    **dict.fromkeys((".yaml", ".yml", ".xml", ".toml", ".pkl", ".pickle", ".npy", ".tar"), "write JSON Lines (.jsonl)"),
}
"""What to do about kinds that are not read."""


def kind_problem(path: Path, kinds: Sequence[str]) -> RecordProblem | None:
    """Why the file is not one of records, by its name and its first bytes. kinds: ends of the names of those that are read."""
    place, suffix = RecordPosition(path, 1), path.suffix.lower()
    if suffix in _OTHER:
        return place.problem("", path.name, f"{suffix} files are not read: records are in {', '.join(kinds)}", _OTHER[suffix])
    with open_regular(path) as file:
        begin = file.read(max(len(mark) for mark, _ in _PACKED.values()))
    for end, (mark, program) in _PACKED.items():
        if suffix == end or (suffix != ".parquet" and begin.startswith(mark)):
            return place.problem("", path.name, "the file is compressed", f"decompress it: {program} {path.name}")
    return None

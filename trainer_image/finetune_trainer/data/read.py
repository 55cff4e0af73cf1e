"""Reads the records of a source, which is a file or a directory of files. The name of a file determines its kind.

    .jsonl, .ndjson, other names     read_json.py, may be read in parts
    .json                            read_json.py, one list
    .csv                             read_tables.py
    .parquet, .arrow                 read_tables.py
    .txt                             read_text.py
    compressed, .tsv, .xlsx, ...     file_kinds.py, which suggests what to do instead

Memory is bounded whatever the size of a file. Reading continues after an invalid record if the next one can be found, so that a
user sees all kinds of mistakes at once. records.py defines records. Called by file_parts.py and sources.py.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from finetune_job.api.inputs import DataFormat
from finetune_job.plan.mapping import UNMAPPED, MappingPlan
from finetune_trainer.data.file_kinds import kind_problem
from finetune_trainer.data.read_json import lines_before, read_json, read_jsonl
from finetune_trainer.data.read_tables import read_arrow, read_csv, read_parquet
from finetune_trainer.data.read_text import read_text
from finetune_trainer.data.records import Record, RecordProblem
from finetune_trainer.files import open_regular

__all__ = ["NoRecordFilesError", "Record", "RecordProblem", "can_be_parted", "lines_before", "read_file", "record_files"]

JSON_LINES = (".jsonl", ".ndjson")
TEXT_FILE = ".txt"
WHOLE_FILES = {
    ".json": read_json, ".csv": read_csv, ".parquet": read_parquet, ".arrow": read_arrow, TEXT_FILE: read_text,
}  # fmt: skip
_OF_DATASETS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Metadata files that the datasets library writes next to the records."""
_CACHE = "cache-"
"""Prefix of .arrow files that are caches of the datasets library."""
MOST_NAMED = 4
"""Maximum number of other files listed in the error about a directory without records."""
KNOWN_EXTENSIONS = (*JSON_LINES, *WHOLE_FILES)


class NoRecordFilesError(FileNotFoundError):
    """A directory holds no file of a known kind."""

    def __init__(self, path: Path, others: Sequence[str] = ()) -> None:
        contents = f"; it holds {', '.join(sorted(others)[:MOST_NAMED])}" if others else ""
        super().__init__(errno.ENOENT, f"the directory holds no record file ({', '.join(KNOWN_EXTENSIONS)}){contents}", str(path))


def record_files(path: Path) -> list[Path]:
    """The files of a source in the order in which they are read: sorted by their paths relative to the source.

    `path` is a file of any name, or a directory. Hidden files, hidden directories and unknown kinds of files are ignored. Raises
    NoRecordFilesError for a directory without record files, and OSError.
    """
    if not path.is_dir():
        open_regular(path).close()
        return [path]

    def fail(error: OSError) -> None:
        raise error

    files: list[Path] = []
    others: list[str] = []
    for directory, below, names in os.walk(path, onerror=fail, followlinks=False):
        below[:] = [name for name in below if not name.startswith(".")]
        for name in names:
            is_cache = name.startswith(_CACHE) and name.endswith(".arrow")
            if name.startswith("."):
                continue
            if name.lower().endswith(KNOWN_EXTENSIONS) and name not in _OF_DATASETS and not is_cache:
                files.append(Path(directory, name))
            elif len(others) < MOST_NAMED:
                others.append(name)
    # If there are record files of other kinds, a text file is taken for a licence or a description.
    files = [file for file in files if file.suffix.lower() != TEXT_FILE] or files
    if not files:
        raise NoRecordFilesError(path, others)
    return sorted(files, key=lambda file: file.relative_to(path).parts)


def can_be_parted(path: Path) -> bool:
    """Whether `read_file` can read parts of this file."""
    return path.suffix.lower() not in WHOLE_FILES


def read_file(
    path: Path, data_format: DataFormat, part: tuple[int, int] | None = None, mapping: MappingPlan = UNMAPPED
) -> Iterator[Record | RecordProblem]:
    """Yield every record of one file in order; an invalid record is replaced by its problem.

    part: a range [start, stop) of bytes, if `can_be_parted`. The lines that begin in it are read, so adjacent parts yield each
    record once. In each part, line numbers begin at 1; add `lines_before(path, start)` for those in the file. Raises OSError.
    """
    problem = kind_problem(path, KNOWN_EXTENSIONS)
    if problem is not None:
        # Report the problem once, even if the file is read in several parts.
        return iter(() if part is not None and part[0] > 0 else (replace(problem, is_of_source=True),))
    reader = WHOLE_FILES.get(path.suffix.lower())
    if reader is None:
        return read_jsonl(path, data_format, part, mapping)
    if part is not None:
        raise ValueError(f"{path.name} cannot be read in parts")
    return reader(path, data_format, mapping)

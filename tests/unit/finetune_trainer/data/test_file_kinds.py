"""Files that are not read as they are: what is said of each, and that others are left alone."""

import bz2
import gzip
import lzma
import re
from pathlib import Path

import pytest

from finetune_job.api.inputs import DataFormat
from finetune_trainer.data.read import NoRecordFilesError, RecordProblem, read_file, record_files

LINE = b'{"text": "t"}\n'
KINDS = ".jsonl, .ndjson, .json, .csv, .parquet, .arrow, .txt"
CSV = "save it as CSV with commas, with the names of the columns in the first line, in a file named .csv"
TEXT = "copy plain text into a file named .txt and set spec.data.format: Text, or write JSON Lines (.jsonl)"


def problem_of(path: Path, content: bytes, part: tuple[int, int] | None = None) -> RecordProblem:
    path.write_bytes(content)
    (found,) = read_file(path, DataFormat.TEXT, part)
    assert isinstance(found, RecordProblem)
    return found


@pytest.mark.parametrize(
    ("suffix", "fix"),
    [
        (".tsv", CSV),
        (".xlsx", CSV),
        (".XLS", CSV),
        (".md", TEXT),
        (".pdf", TEXT),
        (".docx", TEXT),
        (".yaml", "write JSON Lines (.jsonl)"),
        (".pkl", "write JSON Lines (.jsonl)"),
    ],
)
def test_a_kind_of_another_program_is_named_with_those_that_are_read(tmp_path: Path, suffix: str, fix: str) -> None:
    found = problem_of(tmp_path / f"a{suffix}", LINE)
    assert found.reason == f"{suffix.lower()} files are not read; records must be in {KINDS}"
    assert found.fix == fix


@pytest.mark.parametrize(
    ("name", "content", "fix"),
    [
        # mtime=0: the content is in the test's name, which must be the same in every process.
        ("a.jsonl.gz", gzip.compress(LINE, mtime=0), "decompress it: gunzip a.jsonl.gz"),
        ("a.jsonl", gzip.compress(LINE, mtime=0), "decompress it: gunzip a.jsonl"),
        ("a.csv", bz2.compress(LINE), "decompress it: bunzip2 a.csv"),
        ("a.txt", bz2.compress(b""), "decompress it: bunzip2 a.txt"),
        ("a.json.xz", lzma.compress(LINE), "decompress it: unxz a.json.xz"),
        ("a.jsonl.zst", b"\x28\xb5\x2f\xfd rest", "decompress it: unzstd a.jsonl.zst"),
        ("a.zip", b"PK\x03\x04 rest", "decompress it: unzip a.zip"),
        ("a.gz", b"cut", "decompress it: gunzip a.gz"),
    ],
)
def test_a_compressed_file_is_reported_with_the_program_that_decompresses_it(
    tmp_path: Path, name: str, content: bytes, fix: str
) -> None:
    found = problem_of(tmp_path / name, content)
    assert (found.reason, found.fix) == ("the file is compressed", fix)


def test_a_file_that_is_read_in_parts_is_reported_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    assert problem_of(path, gzip.compress(LINE, mtime=0), (0, 5)).fix == "decompress it: gunzip a.jsonl.gz"
    assert list(read_file(path, DataFormat.TEXT, (5, 10))) == []


@pytest.mark.parametrize("name", ["a", "a.jsonl", "a.jsonl.1", "a.data"])
def test_other_names_are_json_lines(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(LINE)
    (record,) = read_file(path, DataFormat.TEXT)
    assert not isinstance(record, RecordProblem)
    assert record.completion == "t"


def test_a_directory_without_records_is_reported_with_its_contents(tmp_path: Path) -> None:
    for name in ("a.jsonl.gz", "b.tsv", ".hidden"):
        (tmp_path / name).write_text("")
    with pytest.raises(NoRecordFilesError, match=re.escape(f"no record file ({KINDS}); it holds a.jsonl.gz, b.tsv")):
        record_files(tmp_path)


def test_text_that_begins_like_a_compressed_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("BZhang wrote this.")
    assert [record.completion for record in read_file(path, DataFormat.TEXT)] == ["BZhang wrote this."]

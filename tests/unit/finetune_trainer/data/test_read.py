"""Every wrong line is named with its number, key, reason and fix; right lines are read as they are."""

import json
import shlex
import subprocess
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finetune_job.api.inputs import DataFormat
from finetune_trainer.data.read import Record, RecordProblem, read_file, record_files
from tests.unit.finetune_trainer.data.record_files import CHATS, PAIRS, contents, write

CHAT, PAIR, TEXT = DataFormat.CHAT, DataFormat.PROMPT_COMPLETION, DataFormat.TEXT

GOOD = {"prompt": "p", "completion": "c"}


def read_records(path, data_format):
    """Every record of a source, file by file."""
    return (record for file in record_files(path) for record in read_file(file, data_format))


def read(tmp_path, content, data_format=DataFormat.PROMPT_COMPLETION):
    path = tmp_path / "records.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(read_records(path, data_format))


def test_records_are_read_in_order_with_their_line_numbers(tmp_path):
    lines = [json.dumps(GOOD), "", "  ", json.dumps({"prompt": "", "completion": "größer", "id": 7})]
    assert read(tmp_path, "\n".join(lines)) == [Record(1, "p", "c"), Record(4, "", "größer")]


def test_a_text_is_a_completion_without_a_prompt(tmp_path):
    assert read(tmp_path, '{"text": "words"}\r\n', DataFormat.TEXT) == [Record(1, "", "words")]


def test_a_byte_order_mark_is_no_part_of_the_first_record(tmp_path):
    assert read(tmp_path, b"\xef\xbb\xbf" + json.dumps(GOOD).encode()) == [Record(1, "p", "c")]


@pytest.mark.parametrize(
    ("line", "key", "reason", "fix"),
    [
        ("not json", "", "is not JSON", "one JSON object per line"),
        ('{"prompt": "p", "completion": NaN}', "", "NaN is not a JSON value", "one JSON object per line"),
        ('{"prompt": "p", "completion": "c"', "", "is not JSON", "one JSON object per line"),
        ('["p", "c"]', "", "is a JSON list", '{"prompt": "...", "completion": "..."}'),
        ('{"prompt": "p"}', "completion", "is missing", '{"prompt": "...", "completion": "..."}'),
        ('{"promt": "p", "completion": "c"}', "prompt", "is missing", "set spec.data.mapping.prompt: promt"),
        ('{"text": "t"}', "prompt", "is missing", "set spec.data.format: Text"),
        ('{"messages": []}', "prompt", "is missing", "set spec.data.format: Chat"),
        ('{"prompt": 3, "completion": "c"}', "prompt", "is a number, not a string", "write"),
        ('{"prompt": "p", "completion": null}', "completion", "is a null, not a string", "write"),
        ('{"prompt": "p", "completion": ["c"]}', "completion", "is a list, not a string", "write"),
        ('{"prompt": "p", "completion": true}', "completion", "is a boolean, not a string", "write"),
        ('{"prompt": "p", "completion": ""}', "completion", "is empty", "remove the record"),
        ('{"prompt": "p", "completion": " \\n"}', "completion", "is empty", "remove the record"),
        ('{"prompt": "p", "completion": "\\ud800"}', "completion", "is not valid Unicode", "surrogate"),
        (b'{"prompt": "p", "completion": "\xff"}', "", "is not UTF-8", "UTF-8"),
        ("[" * 100_000, "", "is not JSON", "one JSON object per line"),
    ],
)
def test_a_wrong_line_is_named_and_the_rest_is_read(tmp_path, line, key, reason, fix):
    encoded = line if isinstance(line, bytes) else line.encode()
    good = json.dumps(GOOD).encode()
    first, problem, last = read(tmp_path, good + b"\n" + encoded + b"\n" + good)
    assert (first, last) == (Record(1, "p", "c"), Record(3, "p", "c"))
    assert isinstance(problem, RecordProblem)
    assert (problem.line, problem.key) == (2, key)
    assert reason in problem.reason
    assert fix in problem.fix
    assert len(problem.value) <= 80


def test_a_text_file_given_as_pairs_and_the_other_way_round_name_the_format(tmp_path):
    (problem,) = read(tmp_path, json.dumps(GOOD), DataFormat.TEXT)
    assert problem.fix.startswith("set spec.data.format: PromptCompletion")


def test_a_missing_file_is_the_file_systems_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        record_files(tmp_path / "none")


@pytest.mark.parametrize("name", ["data", "data.jsonl", "data.ndjson", "data.json", "data.csv", "data.parquet", "data.JSON"])
def test_pairs_are_the_same_from_any_kind_of_file(tmp_path, name):
    path = write(tmp_path / name.lower(), PAIRS).rename(tmp_path / name)
    records = list(read_file(path, PAIR))
    assert contents(records) == [(pair["prompt"], pair["completion"], (), ()) for pair in PAIRS]
    assert {record.file for record in records} == {path}


@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "data.parquet"])
def test_chats_are_the_same_from_any_kind_of_file_that_can_hold_them(tmp_path, name):
    records = list(read_file(write(tmp_path / name, CHATS), CHAT))
    assert contents(records) == [("", "", tuple(chat["messages"]), tuple(chat["tools"] or ())) for chat in CHATS]


def test_places_are_lines_positions_and_rows(tmp_path):
    def places(name):
        return [(record.line, record.unit) for record in read_file(write(tmp_path / name, PAIRS), PAIR)]

    assert places("data.jsonl") == [(1, "line"), (2, "line"), (3, "line")]
    assert places("data.json") == [(1, "record"), (2, "record"), (3, "record")]
    assert places("data.parquet") == [(1, "row"), (2, "row"), (3, "row")]
    assert places("data.csv") == [(2, "line"), (5, "line"), (6, "line")]


def test_a_directory_is_its_known_files_in_order(tmp_path):
    for name in ("b.jsonl", "a/z.json", "a/y.csv", "c.d/x.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, PAIRS)
    for name in ("README.md", ".hidden.jsonl", "a/LICENSE.txt", "dataset_infos.json", "cache-1.arrow"):
        (tmp_path / name).write_text("no record")
    (tmp_path / ".git").mkdir()
    write(tmp_path / ".git/x.jsonl", PAIRS)
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "b.jsonl")
    names = ["a/y.csv", "a/z.json", "b.jsonl", "c.d/x.parquet", "link.jsonl"]
    assert record_files(tmp_path) == [tmp_path / name for name in names]
    assert len(list(read_records(tmp_path, PAIR))) == 5 * len(PAIRS)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path, suffix):
    record = {"prompt": "p" * 500, "completion": "c" * 1500}
    path = tmp_path / f"data{suffix}"
    if suffix == ".parquet":
        table = pa.Table.from_pylist([record | {"completion": f"{number:01500}"} for number in range(10_000)])
        pq.write_table(table, path, row_group_size=1000, compression="none", use_dictionary=False)
    else:
        write(path, [record] * 10_000)
    assert path.stat().st_size > 15_000_000
    next(iter(read_file(path, PAIR)))  # what is imported on first use is not the file's
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_file(path, PAIR)) == 10_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000


def test_prompts_that_are_turns_of_a_chat_name_the_format_that_holds_them(tmp_path):
    turns = {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]}
    (problem,) = read_file(write(tmp_path / "data.jsonl", [turns]), PAIR)
    assert (problem.key, problem.reason) == ("prompt", "is a list, not a string")
    assert problem.fix == "set spec.data.format: Chat and spec.data.lossOn: Completion"
    assert problem.changes == {"spec.data.format": "Chat", "spec.data.lossOn": "Completion"}


@pytest.mark.parametrize(
    ("name", "content", "reason", "encoding"),
    [
        ("a b.csv", "prompt,completion\nq,déjà vu\n".encode("latin-1"), "Windows-1252 or Latin-1: déjà vu", "WINDOWS-1252"),
        ("a b.csv", "prompt,completion\nq,“quoted”…\n".encode("cp1252"), "Latin-1: “quoted”…", "WINDOWS-1252"),
        ("a b.jsonl", '{"prompt": "q", "completion": "für"}\n'.encode("latin-1"), '"für"', "WINDOWS-1252"),
        ("a b.jsonl", '{"prompt": "q", "completion": "a"}\n'.encode("utf-16"), "is UTF-16", "UTF-16"),
    ],
)
def test_a_file_in_another_encoding_is_named_with_the_command_that_converts_it(
    tmp_path: Path, name: str, content: bytes, reason: str, encoding: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    problem = next(item for item in read_file(path, DataFormat.PROMPT_COMPLETION) if isinstance(item, RecordProblem))
    assert reason in problem.reason
    assert problem.fix == f"save the file as UTF-8: iconv -f {encoding} -t UTF-8 'a b.{name[4:]}' > NEW_FILE"
    command = shlex.split(problem.fix.partition(": ")[2])[:-2]
    converted = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True).stdout
    path.write_bytes(converted)
    assert all(isinstance(item, Record) for item in read_file(path, DataFormat.PROMPT_COMPLETION))

"""Tables: CSV and Parquet give what is whole and say which row is wrong."""

import pytest

from finetune_job.api.inputs import DataFormat
from finetune_trainer.data.read import read_file
from tests.unit.finetune_trainer.data.record_files import PAIRS, StartsWith, said, write

CHAT, PAIR, TEXT = DataFormat.CHAT, DataFormat.PROMPT_COMPLETION, DataFormat.TEXT


def test_bytes_that_are_not_utf8_spoil_one_record_of_a_list_or_table(tmp_path):
    path = tmp_path / "data.json"
    path.write_bytes(b'[{"text": "a"}, {"text": "\xff"}, {"text": "b"}]')
    assert [said(item) for item in read_file(path, TEXT)] == [
        "a",
        "2: is not UTF-8, and most likely Windows-1252 or Latin-1: ÿ",
        "b",
    ]
    path = tmp_path / "data.csv"
    path.write_bytes(b"text\na\n\xff\nb\n")
    assert [said(item) for item in read_file(path, TEXT)] == [
        "a",
        "3: is not UTF-8, and most likely Windows-1252 or Latin-1: ÿ",
        "b",
    ]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("", []),
        ("prompt,completion\n", []),
        ("\ufeffprompt,completion\r\np,c\r\n\r\n", ["c"]),
        ("id,completion, prompt\n1,c,p\n", ["c"]),
        ("prompt,answer\np,c\n", ["1: is missing"]),
        ("prompt,completion,completion\np,c,d\n", ["1: is the name of more than one column"]),
        ("prompt,completion\np\np,c\np,c,d\n", ["2: has 1 values, the header has 2", "c", "4: has 3 values"]),
        ("prompt,completion\np,\np,c\n", ["2: is empty", "c"]),
        ('prompt,completion\np,"c"d\np,c\n', ["2: is not CSV", "c"]),
        ('prompt,completion\np,"c\np,c\n', ["2: is not CSV"]),
    ],
)
def test_a_damaged_table_yields_its_intact_rows_and_names_the_wrong_line(tmp_path, content, found):
    path = tmp_path / "data.csv"
    path.write_bytes(content.encode())
    assert [said(item) for item in read_file(path, PAIR)] == [StartsWith(text) for text in found]


@pytest.mark.parametrize(
    ("content", "reason", "fix"),
    [
        (
            "prompt;completion\nq;a\n",
            "is missing: the values are separated by ';', but a CSV file separates them by commas",
            "save the file with commas between the values",
        ),
        (
            "prompt\tcompletion\nq\ta\n",
            "is missing: the values are separated by '\\t', but a CSV file separates them by commas",
            "save the file with commas between the values",
        ),
        (
            "q1,a1\nq2,a2\n",
            "is missing: the first line of a CSV file names its columns, and this one holds 'q1', 'a1'",
            "write the names of the columns into the first line, prompt among them",
        ),
    ],
)
def test_a_table_without_a_header_or_with_other_delimiters_is_refused(tmp_path, content, reason, fix):
    path = tmp_path / "data.csv"
    path.write_text(content)
    (problem,) = read_file(path, PAIR)
    assert (problem.key, problem.reason, problem.fix) == ("prompt", reason, fix)


def test_a_table_holds_no_chats(tmp_path):
    (problem,) = read_file(write(tmp_path / "data.csv", [{"id": "1", "notes": "n"}]), CHAT)
    assert "cannot hold chats" in problem.reason
    assert "JSON Lines" in problem.fix
    assert problem.changes == {}


@pytest.mark.parametrize(
    ("columns", "changes"),
    [
        (["prompt", "completion"], {"spec.data.format": "PromptCompletion"}),
        (["question", "answer"], {"spec.data.mapping.prompt": "question", "spec.data.mapping.completion": "answer"}),
        (["instruction", "input", "output"], {"spec.data.mapping.preset": "Alpaca"}),
        (["instruction", "input", "output", "text"], {"spec.data.mapping.preset": "Alpaca"}),
        (["text"], {"spec.data.format": "Text"}),
    ],
)
def test_a_table_read_as_chats_gets_a_fix_that_fits_its_columns(tmp_path, columns, changes):
    (problem,) = read_file(write(tmp_path / "data.csv", [dict.fromkeys(columns, "words")]), CHAT)
    assert (problem.line, problem.changes) == (1, changes)
    assert "cannot hold chats" in problem.reason


def test_a_table_of_preferences_is_recognized(tmp_path):
    (problem,) = read_file(write(tmp_path / "data.csv", [{"prompt": "q", "chosen": "g", "rejected": "b"}]), CHAT)
    assert problem.are_preferences
    assert "TRL's DPOTrainer" in problem.fix


@pytest.mark.parametrize("cut", [0, 3, 40, -1, -200])
def test_a_damaged_parquet_file_is_a_problem(tmp_path, cut):
    path = write(tmp_path / "data.parquet", PAIRS)
    path.write_bytes(path.read_bytes()[:cut])
    *_, problem = read_file(path, PAIR)
    assert "cannot be read" in problem.reason


def test_parquet_of_other_columns_or_types_is_a_problem(tmp_path):
    (problem,) = read_file(write(tmp_path / "a.parquet", [{"prompt": "p", "answer": "c"}]), PAIR)
    assert (problem.key, problem.reason) == ("completion", "is missing")
    (problem,) = read_file(write(tmp_path / "b.parquet", [{"prompt": "p", "completion": 3}]), PAIR)
    assert (problem.key, problem.unit) == ("completion", "row")

"""Every wrong line is named with its number, key, reason and fix; right lines are read as they are."""

import json

import pytest

from finetune_job.api.inputs import DataFormat
from finetune_trainer.data.read import Record, RecordProblem, read_records

GOOD = {"prompt": "p", "completion": "c"}


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
        ('{"promt": "p", "completion": "c"}', "prompt", "is missing", "rename 'promt' to 'prompt'"),
        ('{"text": "t"}', "prompt", "is missing", "set spec.data.format: Text"),
        ('{"messages": []}', "prompt", "is missing", "set spec.data.format: Chat"),
        ('{"prompt": 3, "completion": "c"}', "prompt", "is a number, not a text", "write"),
        ('{"prompt": "p", "completion": null}', "completion", "is a null, not a text", "write"),
        ('{"prompt": "p", "completion": ["c"]}', "completion", "is a list, not a text", "write"),
        ('{"prompt": "p", "completion": true}', "completion", "is a boolean, not a text", "write"),
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
        list(read_records(tmp_path / "none", DataFormat.TEXT))

"""What a record may hold, and what is said of one that does not."""

import json

import pytest

from finetune_job.api.inputs import DataFormat, DataMapping
from finetune_job.plan.mapping import MappingPlan, mapped_fields
from finetune_trainer.data.read import read_file
from finetune_trainer.data.records import example
from tests.unit.finetune_trainer.data.record_files import CHATS, contents, write

CHAT = DataFormat.CHAT
SHARE_GPT_EXAMPLE = 'write {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}'


def test_tools_may_be_json_in_a_text(tmp_path):
    path = write(tmp_path / "data.jsonl", [{**CHATS[1], "tools": json.dumps(CHATS[1]["tools"])}])
    assert contents(read_file(path, CHAT))[0][3] == tuple(CHATS[1]["tools"])


@pytest.mark.parametrize("extension", ["jsonl", "json", "parquet"])
def test_keys_that_are_null_and_calls_that_are_none_are_absent(tmp_path, extension):
    call = {"function": {"name": "add", "arguments": {"a": None}}}
    turns = [
        {"role": "user", "content": "q", "tool_calls": None, "thinking": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "thinking": None},
        {"role": "assistant", "content": "a", "tool_calls": [], "thinking": "t"},
    ]
    (record,) = read_file(write(tmp_path / f"data.{extension}", [{"messages": turns}]), CHAT)
    if extension == "parquet":  # which cannot tell a null from an absent key
        call["function"]["arguments"] = {}
    assert record.messages == (
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": "a", "thinking": "t"},
    )


@pytest.mark.parametrize(
    ("messages", "key", "reason"),
    [
        ("hello", "messages", "is a string, not a list"),
        ([], "messages", "is empty"),
        (["hello"], "messages[0]", "is a string, not an object"),
        ([{"content": "q"}], "messages[0].role", "is missing"),
        ([{"from": "human", "value": "q"}], "messages[0].role", "is missing"),
        ([{"role": 3, "content": "q"}], "messages[0].role", "is not the name of a role"),
        ([{"role": "user"}], "messages[0].content", "is missing"),
        ([{"role": "user", "content": None}], "messages[0].content", "is null, which only a turn with tool_calls may be"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "image"}]}],
            "messages[0].content[1]",
            'is a part of the type "image", not "text"',
        ),
        ([{"role": "user", "content": "q"}, {"role": "assistant", "content": " "}], "messages[1].content", "is empty"),
        ([{"role": "assistant", "content": None, "tool_calls": "f()"}], "messages[0].tool_calls", "is not a list of objects"),
        ([{"role": "user", "content": "\ud800"}], "messages", "is not valid Unicode"),
        ([{"role": "user", "content": "q", "more": {"\udfff": 1}}], "messages", "is not valid Unicode"),
    ],
)
def test_malformed_chats_are_named_by_key_and_reason(tmp_path, messages, key, reason):
    (problem,) = read_file(write(tmp_path / "data.jsonl", [{"messages": messages}]), CHAT)
    assert problem.key == key
    assert problem.reason.startswith(reason)
    assert problem.fix


@pytest.mark.parametrize("tools", ["no json", 3, ["f"], {"f": 1}])
def test_tools_that_are_no_list_of_objects_are_a_problem(tmp_path, tools):
    (problem,) = read_file(write(tmp_path / "data.jsonl", [{**CHATS[0], "tools": tools}]), CHAT)
    assert problem.key == "tools"


@pytest.mark.parametrize(
    ("record", "fix"),
    [
        ({"id": 1}, SHARE_GPT_EXAMPLE),
        ({"conversations": "a"}, SHARE_GPT_EXAMPLE),
        ({"conversations": ["a"]}, SHARE_GPT_EXAMPLE),
        ({"conversations": [{"value": "a"}]}, SHARE_GPT_EXAMPLE),
        ({"conversations": [{"from": "human"}]}, SHARE_GPT_EXAMPLE),
        ({"conversations": [{"from": 1, "value": "a"}]}, "write one of human, gpt, chatgpt, observation"),
        ([1], SHARE_GPT_EXAMPLE),
    ],
)
def test_a_fix_names_the_keys_that_the_records_have(tmp_path, record, fix):
    mapping = MappingPlan.model_validate(mapped_fields(DataMapping(preset="ShareGPT")))
    (tmp_path / "data.jsonl").write_text(json.dumps(record))
    (problem,) = read_file(tmp_path / "data.jsonl", CHAT, mapping=mapping)
    assert problem.fix == fix


def test_an_example_has_the_names_of_the_mapping():
    pair = MappingPlan(prompt="instruction", completion="output", text="body")
    assert example(DataFormat.PROMPT_COMPLETION, pair) == '{"instruction": "...", "output": "..."}'
    assert example(DataFormat.CHAT, pair.model_copy(update={"chat_of_pair": True})) == '{"instruction": "...", "output": "..."}'
    assert example(DataFormat.TEXT, pair) == '{"body": "..."}'
    plain = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
    assert example(DataFormat.CHAT, pair) == plain

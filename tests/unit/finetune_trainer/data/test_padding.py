"""Nulls that a table writes for missing keys, and arguments of calls in either form."""

import json
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.data.padding import tools_without_padding, turns_without_padding
from tests.unit.finetune_trainer.data.test_forms_of_records import CHATS, claim, learnt, spec_of

CITY, TICKER = {"type": "string"}, {"type": "string"}


def tool(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def calls(*named: tuple[str, Any]) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in named],
    }


def arguments(turn: Any) -> list[Any]:
    return [call["function"]["arguments"] for call in turn["tool_calls"]]


def test_parameters_of_other_tools_are_no_parameters() -> None:
    padded = (tool("weather", {"city": CITY, "ticker": None}), tool("stock", {"city": None, "ticker": TICKER}))
    assert tools_without_padding(padded) == (tool("weather", {"city": CITY}), tool("stock", {"ticker": TICKER}))


def test_nulls_that_json_schema_knows_stay() -> None:
    described = (tool("weather", {"city": {"type": ["string", "null"], "default": None, "enum": ["a", None]}}),)
    assert tools_without_padding(described) == described


@pytest.mark.parametrize(
    ("schema", "is_kept"),
    [
        ({"type": "string"}, False),
        ({"type": ["string", "null"]}, True),
        ({"type": "null"}, True),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, True),
        ({"oneOf": [{"type": "string"}, {"type": "number"}]}, False),
        ({"type": "string", "nullable": True}, True),
        ({"description": "a city"}, True),
        ("a city", True),
    ],
)
def test_a_null_that_the_tool_allows_stays(schema: Any, is_kept: bool) -> None:
    turn = calls(("weather", {"city": None, "ticker": None, "day": "today"}))
    (cleaned,) = turns_without_padding([turn], [tool("weather", {"city": schema, "day": {"type": "string"}})])
    assert arguments(cleaned) == [{"city": None, "day": "today"} if is_kept else {"day": "today"}]


def test_without_descriptions_the_shared_arguments_of_different_tools_show_the_table() -> None:
    padded = calls(("weather", {"city": "x", "ticker": None}), ("stock", {"city": None, "ticker": "y"}))
    assert arguments(turns_without_padding([padded], [])[0]) == [{"city": "x"}, {"ticker": "y"}]
    alone = calls(("weather", {"city": None}))
    assert turns_without_padding([alone], []) == [alone]
    other = calls(("weather", {"city": None}), ("stock", {"ticker": "y"}))
    assert turns_without_padding([other], []) == [other]


def test_lines_and_parquet_with_the_same_rows_are_learnt_alike(tmp_path: Path) -> None:
    template = (
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}{{ '<|im_start|>' + "
        "message['role'] + '\n' + message['content'] }}{% for call in message.tool_calls or [] %}{{ call.function | tojson }}"
        "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tools = [tool("weather", {"city": CITY, "ticker": None}), tool("stock", {"city": None, "ticker": TICKER})]
    turns = [
        {"role": "user", "content": "q", "tool_calls": None},
        {"role": "assistant", "content": "", "tool_calls": calls(("stock", {"city": None, "ticker": "T"}))["tool_calls"]},
    ]
    texts = []
    for name in ("a.jsonl", "a.parquet"):
        (tmp_path / name).mkdir()
        root = claim(tmp_path / name, name, [{"messages": turns, "tools": tools}])
        texts.append(learnt(root, spec_of(name, {**CHATS, "chatTemplate": template})))
    assert texts[0] == texts[1]
    assert "null" not in texts[0][0]
    assert json.loads(texts[0][0].partition("[")[2].partition("<|im_end|>")[0]) == {"arguments": {"ticker": "T"}, "name": "stock"}


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_turns_that_are_a_text_of_json_are_read(tmp_path: Path, name: str) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    spec = spec_of(name, {**CHATS, "chatTemplate": "ChatML"})
    plain = learnt(claim(tmp_path, name, [{"messages": turns}]), spec)
    (tmp_path / "text").mkdir()
    assert learnt(claim(tmp_path / "text", name, [{"messages": json.dumps(turns)}]), spec) == plain


@pytest.mark.parametrize("written", [{"a": 1}, '{"a": 1}'], ids=["object", "text"])
@pytest.mark.parametrize("takes", ["call.function.arguments.items()", "call.function.arguments + ''"], ids=["object", "text"])
def test_arguments_of_calls_are_given_to_the_template_in_the_form_that_it_takes(tmp_path: Path, written: Any, takes: str) -> None:
    template = (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}"
        f"{{% for call in message.tool_calls or [] %}}{{{{ call.function.name }}}}{{{{ ({takes}) | string }}}}{{% endfor %}}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    turns = [{"role": "user", "content": "q"}, calls(("add", written))]
    root = claim(tmp_path, "a.jsonl", [{"messages": turns}])
    (text,) = learnt(root, spec_of("a.jsonl", {**CHATS, "chatTemplate": template}))
    form = "dict_items([('a', 1)])" if "items" in takes else '{"a": 1}'
    assert text.endswith(f"[add{form}<|im_end|>]\n")

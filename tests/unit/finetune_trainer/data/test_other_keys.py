"""Keys of records, turns and parts that the format does not have, in the layouts of the tools that people come from."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_job.finding import Finding
from finetune_trainer.data.prepare import prepare
from tests.unit.finetune_trainer.data.test_forms_of_records import CHATS, TOKENIZER, claim, learnt, resolved, spec_of

ROWS = yaml.safe_load(Path(__file__).with_name("other_keys.yaml").read_text())
QUESTION, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TEMPLATE = (
    "{{ effort }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPEC = {**CHATS, "chatTemplate": TEMPLATE}


def findings(root: Path, spec: dict[str, Any]) -> list[Finding]:
    with prepare(resolved(spec), root, root / "models", TOKENIZER, root / "prepared", num_workers=0) as preparation:
        return list(preparation.findings)


def record(where: str, key: str, value: Any) -> dict[str, Any]:
    """A chat of two answers with the key at its place, in the first answer or in its only part."""
    if where == "record":
        return {"messages": [QUESTION, ANSWER, QUESTION, ANSWER], key: value}
    answer = {**ANSWER, key: value} if where == "turn" else {**ANSWER, "content": [{"type": "text", "text": "a", key: value}]}
    if where == "part" and key == "value":
        answer = {**ANSWER, "content": [{"type": "text", "value": value}]}
    return {"messages": [QUESTION, answer, QUESTION, ANSWER]}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What is learnt of the chat without the key."""
    root = claim(tmp_path_factory.mktemp("plain"), "a.jsonl", [record("record", "id", 1)])
    return learnt(root, spec_of("a.jsonl", SPEC))


@pytest.mark.parametrize(("tool", "where", "key", "value", "outcome"), ROWS)
def test_a_key_is_read_refused_told_or_known_to_mean_nothing(
    tmp_path: Path, plain: list[str], tool: str, where: str, key: str, value: Any, outcome: str
) -> None:
    root = claim(tmp_path, "a.jsonl", [record(where, key, value)])
    spec = spec_of("a.jsonl", SPEC)
    found = findings(root, spec)
    errors = [finding for finding in found if finding.severity == "error"]
    named = [finding for finding in found if key in finding.message]
    assert bool(errors) == (outcome == "refused"), (tool, found)
    assert bool(named) == (outcome in ("refused", "told")), (tool, found)
    if outcome != "refused":
        assert (learnt(root, spec) == plain) == (outcome != "read"), tool


@pytest.mark.parametrize(("tool", "where", "key", "value"), [row[:4] for row in ROWS if row[4] in ("refused", "told")])
def test_a_key_that_is_named_as_ignored_means_nothing(
    tmp_path: Path, plain: list[str], tool: str, where: str, key: str, value: Any
) -> None:
    root = claim(tmp_path, "a.jsonl", [record(where, key, value)])
    spec = spec_of("a.jsonl", {**SPEC, "mapping": {"ignored": [key]}})
    assert findings(root, spec) == [], tool
    assert learnt(root, spec) == plain


def test_keys_that_are_not_read_are_one_warning_of_their_source(tmp_path: Path) -> None:
    rows = [{"messages": [QUESTION, ANSWER], "system": "be kind"}, {"messages": [ANSWER], "system": "", "mood": 1}]
    (finding,) = findings(claim(tmp_path, "a.jsonl", rows), spec_of("a.jsonl", CHATS))
    assert (finding.rule, finding.severity) == ("data-keys-unread", "warning")
    assert finding.message == "its records have keys that are not read: 'mood' (1 record), 'system' (1 record)"
    assert finding.fix == (
        "to begin chats with 'system', set spec.data.mapping.system: system; name keys without meaning in "
        "spec.data.mapping.ignored"
    )


def test_a_record_of_question_and_answer_hears_of_the_format_that_reads_its_system_text(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "completion": "a", "system": "be kind", "context": "c", "history": [["q", "a"]]}]
    (finding,) = findings(claim(tmp_path, "a.jsonl", rows), spec_of("a.jsonl", {}))
    assert finding.fix == (
        "to add 'context' to the prompt, set spec.data.mapping.input: context; to put its turns before the prompt, set "
        "spec.data.format: Chat and spec.data.mapping.history: history; to begin chats with 'system', set spec.data.format: Chat "
        "and spec.data.mapping.system: system; name keys without meaning in spec.data.mapping.ignored"
    )


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_columns_of_a_table_are_judged_as_the_keys_of_lines_are(tmp_path: Path, name: str) -> None:
    rows = [{"messages": [QUESTION, ANSWER], "label": 3, "id": 7, "mood": "good", "images": [], "weight": 1.0}]
    (finding,) = findings(claim(tmp_path, name, rows), spec_of(name, CHATS))
    assert finding.message == "its records have keys that are not read: 'label' (1 record), 'mood' (1 record)"


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_rating_in_a_table_is_refused_as_in_lines(tmp_path: Path, name: str) -> None:
    (finding,) = findings(claim(tmp_path, name, [{"messages": [QUESTION, ANSWER], "label": False}]), spec_of(name, CHATS))
    assert finding.rule == "data-preference-pairs"


def test_system_and_history_of_alpaca_records_are_turns_of_the_chat(tmp_path: Path) -> None:
    row = {"instruction": "q2", "input": "", "output": "a2", "system": "be kind", "history": [["q1", "a1"]]}
    root = claim(tmp_path, "a.jsonl", [row, {**row, "system": "", "history": []}, {**row, "history": None}])
    spec = spec_of("a.jsonl", {**CHATS, "mapping": {"preset": "Alpaca"}, "chatTemplate": "ChatML"})
    start, end = "<|im_start|>", "<|im_end|>"
    system, last = f"{start}system\nbe kind{end}\n", f"{start}user\nq2{end}\n{start}assistant\n[a2{end}]\n"
    earlier = f"{start}user\nq1{end}\n{start}assistant\n[a1{end}]\n"
    assert learnt(root, spec) == [system + earlier + last, last, system + last]
    assert findings(root, spec) == []


@pytest.mark.parametrize("history", [[["q"]], [["q", 1]], [["q", " "]], "q", [{"question": "q"}]], ids=str)
def test_a_history_of_another_form_is_refused(tmp_path: Path, history: Any) -> None:
    rows = [{"instruction": "q", "output": "a", "history": history}]
    (finding,) = findings(claim(tmp_path, "a.jsonl", rows), spec_of("a.jsonl", {**CHATS, "mapping": {"preset": "Alpaca"}}))
    assert finding.rule == "data-record-invalid"
    assert "history[0]" in finding.message


def test_more_keys_than_are_counted_leave_a_bounded_result(tmp_path: Path) -> None:
    rows = [{"messages": [QUESTION, ANSWER], **{f"{number}{'k' * 300}": 1 for number in range(200)}}]
    (finding,) = findings(claim(tmp_path, "a.jsonl", rows), spec_of("a.jsonl", CHATS))
    assert finding.message.endswith("and 56 more")
    assert len(json.dumps(finding.model_dump(mode="json"))) < 4000


def test_messages_that_are_the_chosen_answer_are_learnt_if_no_answer_was_rejected(tmp_path: Path) -> None:
    rows = [{"messages": [QUESTION, ANSWER], "chosen": [QUESTION, ANSWER]}]
    assert findings(claim(tmp_path, "a.jsonl", rows), spec_of("a.jsonl", CHATS)) == []


def test_the_name_of_a_tool_in_its_result_is_told_by_the_call(tmp_path: Path) -> None:
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}],
    }
    rows = [{"messages": [QUESTION, call, {"role": "tool", "name": "add", "content": "2"}, ANSWER]}]
    template = TEMPLATE.replace("message['content'] +", "message['content'] + (message.tool_calls or '') | string +")
    assert findings(claim(tmp_path, "a.jsonl", rows), spec_of("a.jsonl", {**CHATS, "chatTemplate": template})) == []


def test_a_part_of_the_record_that_is_ignored_is_not_read(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    template = TEMPLATE.replace("{{ effort }}", "{{ effort }}{% if tools %}{{ tools | tojson }}{% endif %}")
    rows = [{"messages": [QUESTION, ANSWER], "tools": [tool]}]
    root = claim(tmp_path, "a.jsonl", rows)
    assert "add" in learnt(root, spec_of("a.jsonl", {**CHATS, "chatTemplate": template}))[0]
    ignoring = spec_of("a.jsonl", {**CHATS, "chatTemplate": template, "mapping": {"ignored": ["tools"]}})
    assert "add" not in learnt(root, ignoring)[0]


@pytest.mark.parametrize("history", ['[["q1", "a1"]]', [["q1", "a1"]]], ids=["json", "list"])
def test_a_history_may_be_a_string_of_json(tmp_path: Path, history: Any) -> None:
    rows = [{"instruction": "q2", "output": "a2", "history": history}]
    root = claim(tmp_path, "a.jsonl", rows)
    (text,) = learnt(root, spec_of("a.jsonl", {**CHATS, "mapping": {"preset": "Alpaca"}, "chatTemplate": "ChatML"}))
    assert "[a1<|im_end|>]" in text


def test_a_text_with_a_picture_beside_it_is_learnt_and_the_picture_told(tmp_path: Path) -> None:
    rows = [{"text": "a", "image_url": "x.png"}]
    (finding,) = findings(claim(tmp_path, "a.jsonl", rows), spec_of("a.jsonl", {"format": "Text"}))
    assert (finding.rule, finding.severity) == ("data-keys-unread", "warning")


@pytest.mark.parametrize("choices", [True, 5, {"type": "null"}], ids=str)
def test_a_schema_of_another_form_lets_the_null_stay(tmp_path: Path, choices: Any) -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"anyOf": choices}}}},
    }
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": None}}}
    rows = [{"messages": [QUESTION, {**ANSWER, "tool_calls": [call]}], "tools": [tool]}]
    template = TEMPLATE.replace("message['content'] +", "message['content'] + (message.tool_calls or '') | string +")
    (text,) = learnt(claim(tmp_path, "a.jsonl", rows), spec_of("a.jsonl", {**CHATS, "chatTemplate": template}))
    assert "'arguments': {'a': None}" in text


def test_a_record_that_learns_nothing_is_refused_by_the_first_look_as_by_preflight(tmp_path: Path) -> None:
    rows = [{"messages": [QUESTION, {**ANSWER, "weight": 0}]}]
    (finding,) = findings(claim(tmp_path, "a.jsonl", rows), spec_of("a.jsonl", CHATS))
    assert "gives no token that is learnt" in finding.message

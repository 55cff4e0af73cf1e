"""Arguments of the chat template from the manifest and from records."""

import copy
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.data.prepare import prepare
from tests.unit.finetune_trainer.data.test_forms_of_records import CHATS, TOKENIZER, claim, resolved, spec_of

TEMPLATE = (
    "{% if effort %}{{ '<|im_start|>system\neffort: ' + effort + '<|im_end|>\n' }}{% endif %}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + ('<think></think>' if message['role'] == 'assistant' else '') }}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if thinking is false %}{{ '<think></think>' }}{% endif %}"
    "{% endif %}"
)
TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
DATA = {**CHATS, "chatTemplate": TEMPLATE}


def texts(root: Path, data: dict[str, Any]) -> list[str]:
    from finetune_trainer.data.read import read_file
    from finetune_trainer.data.tokenize import tokenize

    plan = resolved(spec_of("a.jsonl", data))
    records = list(read_file(root / "data/a.jsonl", plan.format, mapping=plan.mapping))
    made = tokenize(TOKENIZER, records, plan.loss_on, plan.chat_template, template_arguments=plan.template_arguments)
    return [
        TOKENIZER.decode([token for token, learnt in zip(each.input_ids, each.supervised, strict=True) if learnt is is_learnt])
        for each in made
        for is_learnt in (False, True)
    ]


def test_arguments_of_the_manifest_reach_each_chat_and_those_of_a_record_override_them(tmp_path: Path) -> None:
    rows = [{"messages": TURNS}, {"messages": TURNS, "chat_template_kwargs": {"effort": "low"}}]
    root = claim(tmp_path, "a.jsonl", rows)
    asked = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    system = "<|im_start|>system\neffort: {}<|im_end|>\n"
    unlearnt = texts(root, {**DATA, "templateArguments": {"effort": "high"}})[::2]
    assert unlearnt == [f"{system.format('high')}{asked}\n", f"{system.format('low')}{asked}\n"]
    assert texts(root, DATA)[::2] == [f"{asked}\n", f"{system.format('low')}{asked}\n"]


def test_what_asks_for_an_answer_with_the_arguments_is_not_learnt(tmp_path: Path) -> None:
    root = claim(tmp_path, "a.jsonl", [{"messages": TURNS}])
    assert texts(root, DATA)[1] == "<think></think>a<|im_end|>"
    assert texts(root, {**DATA, "templateArguments": {"thinking": False}})[1] == "a<|im_end|>"


def test_prepared_data_with_other_arguments_is_prepared_again(tmp_path: Path) -> None:
    root = claim(tmp_path, "a.jsonl", [{"messages": TURNS}])

    def inputs(data: dict[str, Any]) -> Any:
        plan = resolved(spec_of("a.jsonl", data))
        with prepare(plan, root, root / "models", TOKENIZER, root / "prepared", num_workers=0) as preparation:
            return copy.deepcopy(dict(preparation.inputs))

    assert inputs(DATA) != inputs({**DATA, "templateArguments": {"effort": "high"}})
    # What an earlier release prepared has no such keys, and stays valid.
    assert "template_arguments" not in inputs(DATA)["settings"]
    mapped = inputs({**DATA, "mapping": {"preset": "ShareGPT", "messages": "messages"}})["settings"]["mapping"]
    assert {"history", "ignored"}.isdisjoint(mapped)


@pytest.mark.parametrize(
    ("arguments", "where"),
    [("[1]", ""), (3, ""), ({"messages": []}, ".messages"), ({"continue_final_message": True}, ".continue_final_message")],
)
def test_arguments_of_a_record_that_no_template_takes_are_refused(tmp_path: Path, arguments: Any, where: str) -> None:
    root = claim(tmp_path, "a.jsonl", [{"messages": TURNS, "chat_template_kwargs": arguments}])
    with prepare(resolved(spec_of("a.jsonl", DATA)), root, root / "models", TOKENIZER, root / "p", num_workers=0) as preparation:
        (finding,) = preparation.findings
    assert finding.rule == "data-record-invalid"
    assert f"'chat_template_kwargs{where}'" in finding.message


def test_an_argument_that_the_template_does_not_read_is_a_warning(tmp_path: Path) -> None:
    from finetune_trainer.data.tokenizer import check_chat_template

    plan = resolved(spec_of("a.jsonl", {**DATA, "templateArguments": {"effort": "high", "efort": "low"}}))
    found = [finding for finding in check_chat_template(plan, TOKENIZER, tmp_path) if finding.rule == "template-argument-unread"]
    assert [(finding.field, finding.value) for finding in found] == [("spec.data.templateArguments", "efort")]

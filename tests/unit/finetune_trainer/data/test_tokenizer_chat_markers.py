"""What stands around the turns of a chat: generation blocks in the right place, markers that are tokens, roles that can be
told."""

import json
from pathlib import Path
from typing import Any

import pytest

from finetune_job.api.inputs import DataFormat, LossOn
from finetune_trainer.data.tokenizer import check_chat_template
from tests.unit.finetune_trainer.data.chat_templates import CHATML, MISTRAL, THINKING
from tests.unit.finetune_trainer.data.test_tokenizer_chat_template import plan
from tests.unit.finetune_trainer.data.tokenizers_by_hand import byte_tokenizer, word_tokenizer

ASKS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
BLOCK, END = "{% generation %}", "{% endgeneration %}"
WORDS, STOP = "{{ m.content }}", "<|im_end|>"


def turns(assistant: str, other: str = WORDS + STOP) -> str:
    """ChatML with `assistant` for what the assistant's turns hold."""
    inner = f"{{% if m.role == 'assistant' %}}{assistant}{{% else %}}{other}{{% endif %}}"
    return f"{{% for m in messages %}}{{{{ '<|im_start|>' + m.role + '\n' }}}}{inner}{{{{ '\n' }}}}{{% endfor %}}"


def found(template: str, loss_on: LossOn = LossOn.ASSISTANT, tokenizer: Any = None) -> list[tuple[str, str]]:
    tokenizer = tokenizer or CHATML.tokenizer()
    return [
        (finding.rule, finding.severity) for finding in check_chat_template(plan(template, loss_on=loss_on), tokenizer, Path())
    ]


@pytest.mark.parametrize(
    ("template", "rule"),
    [
        (turns(WORDS + BLOCK + STOP + END), "chat-generation-misplaced"),
        (turns(BLOCK + WORDS + STOP + END, BLOCK + WORDS + STOP + END), "chat-template-unusable"),
        (turns(BLOCK + WORDS + END + STOP), "chat-template-unusable"),
        (turns(BLOCK + WORDS + STOP + END), ""),
    ],
)
def test_generation_blocks_hold_what_the_assistant_says_and_the_token_that_ends_it(template: str, rule: str) -> None:
    assert found(template + ASKS) == ([(rule, "error")] if rule else [])
    assert found(template + ASKS, LossOn.ALL) == []


def test_a_block_around_the_questions_alone_is_found() -> None:
    assert found(turns(WORDS + STOP, BLOCK + WORDS + STOP + END) + ASKS) == [("chat-generation-misplaced", "error")]


def test_a_marker_that_is_no_token_is_a_warning() -> None:
    tokenizer = byte_tokenizer(["<|im_end|>"], eos_token="<|im_end|>")
    assert found(CHATML.template, tokenizer=tokenizer) == [("chat-marker-split", "warning")]


def test_a_template_that_never_asks_for_an_answer_is_a_warning_where_that_matters() -> None:
    assert found(turns(WORDS + STOP) + ASKS) == []
    assert found(turns(WORDS + STOP)) == [("chat-answer-not-asked-for", "warning")]
    # The end of the question asks.
    assert found(MISTRAL.template, tokenizer=MISTRAL.tokenizer()) == []


def test_an_answer_that_never_begins_as_it_is_asked_for_is_a_warning() -> None:
    tokenizer, dropped = THINKING.tokenizer(), "message.content.split('</think>')[-1]"
    assert found(THINKING.template, tokenizer=tokenizer) == [("chat-asks-otherwise", "warning")]
    for kept in ("message.content", f"'<think>\n' + (message.reasoning_content or '') + '</think>' + {dropped}"):
        assert found(THINKING.template.replace(dropped, kept), tokenizer=tokenizer) == []


def test_turns_without_roles_are_a_warning() -> None:
    assert found("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}") == [("chat-roles-unmarked", "warning")]


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_a_text_has_to_end_where_generation_stops(tmp_path: Path, name: str) -> None:
    texts = plan(data_format=DataFormat.PROMPT_COMPLETION, loss_on=LossOn.COMPLETION)
    assert check_chat_template(texts, word_tokenizer(), tmp_path) == []
    (tmp_path / name).write_text(json.dumps({"eos_token_id": [5, 6]}))
    (finding,) = check_chat_template(texts, word_tokenizer(), tmp_path)
    assert (finding.rule, finding.severity, finding.value) == ("stop-token-unknown", "warning", "</s>")
    assert "add 0 to eos_token_id" in finding.fix
    (tmp_path / name).write_text(json.dumps({"eos_token_id": [5, 0]}))
    assert check_chat_template(texts, word_tokenizer(), tmp_path) == []


def test_the_generation_configuration_counts_before_the_tokenizer(tmp_path: Path) -> None:
    """A model whose generation stops elsewhere than its template: the tokenizer's end token alone helps no library."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    (finding,) = check_chat_template(plan(), CHATML.tokenizer(), tmp_path)
    assert finding.rule == "chat-stop-token-unknown"

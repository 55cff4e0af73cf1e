"""A chat is rendered by the template that is meant, and what cannot be rendered is refused with its reason and a fix."""

import pytest

from finetune_job.api.inputs import LossOn
from tests.unit.finetune_trainer.data.chats_by_hand import TOKENIZERS, chat, one, supervised
from tests.unit.finetune_trainer.data.tokenizers_by_hand import byte_tokenizer


def test_a_template_in_the_spec_comes_before_the_tokenizers():
    tokenizer = TOKENIZERS["bytes"]["ChatML"]
    written = "{% for message in messages %}{{ message['role'][0] + message['content'] + eos_token }}{% endfor %}"
    document = one(tokenizer, chat(("u", "q"), ("a", "b")), template=written)
    assert tokenizer.decode(document.input_ids) == "uq<|im_end|>ab<|im_end|>"
    # Nothing asks for an answer here: a caller's prompt ends with the question, and all that follows is to be said.
    assert supervised(tokenizer, document) == ["ab<|im_end|>"]


@pytest.mark.parametrize("loss_on", list(LossOn))
@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([("u", "q"), ("u", "q"), ("a", "b")], "roles user, user, assistant (TemplateError: Conversation roles must alternate"),
        ([("s", "q"), ("u", "q"), ("a", "b")], "System role not supported"),
    ],
)
def test_what_the_template_refuses_is_a_problem_in_its_words(turns, reason, loss_on):
    made = one(TOKENIZERS["bytes"]["Gemma"], chat(*turns), loss_on)
    assert reason in made.reason
    assert "spec.data.chatTemplate" in made.fix


def test_a_tokenizer_without_a_template_names_the_setting():
    made = one(byte_tokenizer(["</s>"], eos_token="</s>"), chat(("u", "q"), ("a", "b")))
    assert "no chat template" in made.reason
    assert "spec.data.chatTemplate" in made.fix

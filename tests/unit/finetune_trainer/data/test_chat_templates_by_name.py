"""Templates that a manifest may name write the published forms, and can be trained on."""

import pytest

from finetune_job.api.inputs import DataFormat, LossOn
from finetune_job.chat_templates import TEMPLATES, fitting_template
from finetune_job.plan.run_plan import DataPlan
from finetune_trainer.data.template_probe import chat_template
from finetune_trainer.data.tokenizer import check_chat_template
from tests.support.cases import table
from tests.unit.finetune_trainer.data.tokenizers_by_hand import byte_tokenizer

CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "a1"},
    {"role": "user", "content": "q2"},
    {"role": "assistant", "content": "a2"},
]
FORMS = table(__file__, "FORMS")  # fmt: skip


def plan_of(name):
    settings = {"max_sequence_length": 99, "packing": True, "loss_on": LossOn.ASSISTANT, "chat_template": TEMPLATES[name]}
    return DataPlan(train=(), validation=None, format=DataFormat.CHAT, **settings)


def test_every_template_is_here():
    assert set(TEMPLATES) == set(FORMS)


@pytest.mark.parametrize("name", FORMS)
def test_a_template_writes_its_form_and_what_is_learnt_is_what_the_assistant_says(name, tmp_path):
    special, begin, end, text, learnt = FORMS[name]
    tokenizer = byte_tokenizer(special, eos_token=end, **({"bos_token": begin} if begin else {}))
    assert fitting_template(frozenset(special)) == name
    template = chat_template(tokenizer, TEMPLATES[name])
    assert template.render(CHAT) == text
    rendered = template.render_turns(CHAT)
    assert ["".join(rendered.text[a:b] for a, b in turn) for turn in rendered.turns] == learnt
    found = {finding.rule: finding.severity for finding in check_chat_template(plan_of(name), tokenizer, tmp_path)}
    assert "error" not in found.values()
    # The end of a turn is not the end of a text there, and the form begins an answer within the same turn as the question.
    assert set(found) <= {"chat-stop-token-unknown", "chat-answer-not-asked-for"}


@pytest.mark.parametrize(
    ("named", "tokens", "fitting"),
    [
        ("Llama3", ["<|im_start|>", "<|im_end|>"], "ChatML"),
        ("ChatML", ["<start_of_turn>", "<end_of_turn>"], "Gemma"),
        ("Gemma", ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], "Llama3"),
        ("ChatML", [], "Plain"),
    ],
)
def test_a_template_of_another_family_is_named_with_one_that_fits(named, tokens, fitting, tmp_path):
    tokenizer = byte_tokenizer(["<s>", "</s>", *tokens], eos_token="</s>", bos_token="<s>")
    (finding,) = check_chat_template(plan_of(named), tokenizer, tmp_path)
    assert (finding.rule, finding.field, finding.value) == ("chat-template-unusable", "spec.data.chatTemplate", named)
    assert finding.fix == f"set spec.data.chatTemplate: {fitting}, which fits this tokenizer"
    assert [(change.field, change.value) for change in finding.changes] == [("spec.data.chatTemplate", fitting)]
    assert [each for each in check_chat_template(plan_of(fitting), tokenizer, tmp_path) if each.severity == "error"] == []

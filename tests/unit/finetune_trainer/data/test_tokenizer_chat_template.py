"""What preflight says of a chat template: errors where training would go wrong for any chat, warnings where serving may."""

import json

import pytest
from tokenizers import processors
from transformers import ByT5Tokenizer

from finetune_job.api.inputs import DataFormat, LossOn
from finetune_job.failures import FailureClass, Outcome
from finetune_job.plan.run_plan import DataPlan
from finetune_trainer.data.tokenizer import check_chat_template, load_tokenizer, no_tokenizer
from finetune_trainer.roles.preflight import run
from tests.unit.finetune_trainer.data.chat_templates import CHATML, FAMILIES, GEMMA, LLAMA3, THINKING, TWO_STOPS
from tests.unit.finetune_trainer.data.tokenizers_by_hand import byte_tokenizer
from tools import quickstart


def plan(template=None, data_format=DataFormat.CHAT, loss_on=LossOn.ASSISTANT):
    return DataPlan(
        train=(),
        validation=None,
        format=data_format,
        chat_template=template,
        max_sequence_length=64,
        packing=True,
        loss_on=loss_on,
    )


def rules(findings):
    return [(finding.rule, finding.severity, finding.field) for finding in findings]


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.stop == family.eos or family is TWO_STOPS])
@pytest.mark.parametrize("loss_on", list(LossOn))
def test_templates_like_those_of_real_models_are_accepted(tmp_path, name, loss_on):
    warned = [("chat-asks-otherwise", "warning", "spec.model.source")] if FAMILIES[name] is THINKING else []
    assert rules(check_chat_template(plan(loss_on=loss_on), FAMILIES[name].tokenizer(), tmp_path)) == warned


def test_other_formats_need_no_template(tmp_path):
    tokenizer = byte_tokenizer(["</s>"], eos_token="</s>")
    assert check_chat_template(plan(data_format=DataFormat.TEXT, loss_on=LossOn.ALL), tokenizer, tmp_path) == []


def test_no_template_anywhere_is_an_error_of_the_model(tmp_path):
    (finding,) = check_chat_template(plan(), byte_tokenizer(["</s>"], eos_token="</s>"), tmp_path)
    assert rules([finding]) == [("chat-template-unusable", "error", "spec.model.source")]
    assert "spec.data.chatTemplate" in finding.fix


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for", "TemplateSyntaxError"),
        ("{{ raise_exception('never') }}", "never"),
        ("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}", "special token"),
        (CHATML.template.replace("<|im_end|>", "<|unknown|>"), "special token"),
    ],
)
def test_a_written_template_that_cannot_be_trained_on_is_an_error_of_that_field(tmp_path, template, reason):
    (finding,) = check_chat_template(plan(template), CHATML.tokenizer(), tmp_path)
    assert rules([finding]) == [("chat-template-unusable", "error", "spec.data.chatTemplate")]
    assert reason in finding.message


def test_a_begin_token_that_the_template_writes_twice_is_an_error(tmp_path):
    template = "{{ bos_token }}" + LLAMA3.template
    assert rules(check_chat_template(plan(template), LLAMA3.tokenizer(), tmp_path)) == [
        ("chat-template-doubles-begin", "error", "spec.data.chatTemplate")
    ]


def test_a_begin_token_that_the_tokenizer_writes_and_the_template_does_not_is_a_warning(tmp_path):
    tokenizer = LLAMA3.tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", tokenizer.bos_token_id)]
    )
    assert check_chat_template(plan(), tokenizer, tmp_path) == []
    without = LLAMA3.template.replace("bos_token + ", "")
    (finding,) = check_chat_template(plan(without), tokenizer, tmp_path)
    assert rules([finding]) == [("chat-template-without-begin", "warning", "spec.data.chatTemplate")]
    assert check_chat_template(plan(without), LLAMA3.tokenizer(), tmp_path) == []


def test_a_stop_token_at_which_no_server_stops_is_a_warning_until_the_model_names_it(tmp_path):
    tokenizer = GEMMA.tokenizer()
    stop = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    (finding,) = check_chat_template(plan(), tokenizer, tmp_path)
    assert rules([finding]) == [("chat-stop-token-unknown", "warning", "spec.model.source")]
    assert f"add {stop} to eos_token_id" in finding.fix
    for written in (stop, [1, stop]):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": written}))
        assert check_chat_template(plan(), tokenizer, tmp_path) == []


def test_a_template_that_writes_the_date_is_a_warning(tmp_path):
    template = "{{ strftime_now('%Y') }}" + CHATML.template
    assert rules(check_chat_template(plan(template), CHATML.tokenizer(), tmp_path)) == [
        ("chat-template-dated", "warning", "spec.data.chatTemplate")
    ]


def test_a_slow_tokenizer_is_refused(tmp_path):
    class Slow:
        is_fast = False
        eos_token_id = 0

        def get_chat_template(self, written, tools):
            return CHATML.template

    (finding,) = check_chat_template(plan(), Slow(), tmp_path)
    assert "slow" in finding.message


def test_preflight_refuses_chats_that_no_template_renders_and_prepares_those_that_one_does(context, claims):
    for name in ("train", "validation"):
        turns = [{"role": "user", "content": f"def {name}(value):"}, {"role": "assistant", "content": "Return the value."}]
        quickstart.write_json_lines(claims / "data" / f"{name}.jsonl", [{"messages": turns}] * 16)
    changes = {"data.format": "Chat", "data.lossOn": None}
    refused = run(context(changes))
    assert [(finding.rule, finding.field) for finding in refused.findings] == [("chat-template-unusable", "spec.model.source")]
    assert (refused.outcome, refused.failure) == (Outcome.REFUSED, FailureClass.USER_MODEL)
    template = "{% for message in messages %}{{ message.role + ': ' + message.content + eos_token }}{% endfor %}"
    accepted = run(context(changes | {"data.chatTemplate": template}))
    assert accepted.outcome is Outcome.SUCCEEDED, accepted
    assert int(accepted.facts["supervised_tokens"]) > 16


@pytest.mark.parametrize(
    "name",
    [
        *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model"),
        *("qwen.tiktoken", "sentencepiece.bpe.model", "rwkv_vocab_v20230424.txt", "tokenization_hyena.py"),
    ],
)
def test_a_directory_without_a_vocabulary_has_no_tokenizer(tmp_path, name):
    for beside in ("config.json", "model.safetensors", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        (tmp_path / beside).touch()
    assert "has no tokenizer" in no_tokenizer(tmp_path).message
    (tmp_path / name).touch()
    assert no_tokenizer(tmp_path) is None


def test_a_tokenizer_of_bytes_needs_no_vocabulary(tmp_path):
    ByT5Tokenizer().save_pretrained(tmp_path)
    assert no_tokenizer(tmp_path) is None
    assert load_tokenizer(tmp_path, allow_remote_code=False)[1] == []

"""What is trained loads in plain transformers and PEFT, with the tokenizer and template that it was trained with."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from finetune_trainer.checkpoint.load import RangeReader
from finetune_trainer.checkpoint.manifest import decode_manifest
from finetune_trainer.preflight.model_process import check_model
from finetune_trainer.weights.base_identity import BASE_KEY, weights_digest
from finetune_trainer.weights.headers import read_checkpoint
from tests.support.forked_ranks import run_gang
from tests.support.tiny_model import VOCABULARY, run_context, tiny_spec, write_tiny_llama, write_tokenizer

FULL = {"type": "Full", "lora": None}
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
FREEZING: dict[str, tuple[dict[str, Any], str]] = {
    "afmoe": ({"num_experts": 4, "num_experts_per_tok": 2, "num_dense_layers": 1}, "model.layers.1.mlp.expert_bias"),
    "roformer": (
        {"is_decoder": True, "embedding_size": 32, "max_position_embeddings": 256},
        "roformer.encoder.embed_positions.weight",
    ),
    "ernie4_5_moe": ({"moe_num_experts": 4, "moe_k": 2}, "model.layers.1.mlp.gate.moe_statics.e_score_correction_bias"),
}
"""Architectures whose own code freezes a parameter, a router's correction or positions, and its name."""


@pytest.mark.parametrize("tied", [False, True])
def test_a_full_model_in_shards_loads_in_plain_transformers(tmp_path: Path, tied: bool) -> None:
    spec = tiny_spec(method=FULL, training={"maxSteps": 1}, merge={"maxShardSize": "30KB"})
    base = tmp_path / "models" / "tiny"
    write_tiny_llama(base, torch.bfloat16, tied)
    for name in ("video_preprocessor_config.json", "report.json", "dump.pkl"):
        (base / name).write_text("{}")
    context = run_context(tmp_path, spec)
    assert run_gang(context) == [0, 0]
    result = context.workspace.adapter
    assert (result / "video_preprocessor_config.json").is_file()
    assert not (result / "report.json").exists(), "the base is a release of this product, and the new one has its own"
    assert not (result / "dump.pkl").exists()
    index = json.loads((result / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in result.glob("*.safetensors")}
    loaded, info = AutoModelForCausalLM.from_pretrained(result, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.config.dtype is torch.bfloat16
    (checkpoint,) = context.workspace.checkpoints.glob("step-*")
    reader = RangeReader(checkpoint, decode_manifest((checkpoint / "manifest.json").read_bytes()))
    parameters = dict(loaded.named_parameters())
    assert set(parameters) == reader.names
    for name, parameter in parameters.items():
        assert parameter.dtype is torch.bfloat16
        assert torch.equal(parameter, reader.whole(name).to(torch.bfloat16)), name


@pytest.mark.parametrize(
    ("kind", "parallelism"),
    zip(FREEZING, [{"processesPerNode": 1}, {"fsdp": {"version": 2}}, {"fsdp": {"version": 1}}], strict=True),
)
def test_what_an_architecture_freezes_is_accepted_stays_and_is_in_the_result(
    tmp_path: Path, kind: str, parallelism: dict[str, Any]
) -> None:
    settings, frozen = FREEZING[kind]
    base = tmp_path / "models" / "tiny"
    torch.manual_seed(5)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **settings), dtype=torch.float32)
    with torch.no_grad():
        made.get_parameter(frozen).normal_()
    made.save_pretrained(base)
    write_tokenizer(base)
    training = {"maxSteps": 2, "weightDecay": "0.1"}
    context = run_context(tmp_path, tiny_spec(method=FULL, training=training, parallelism=parallelism, data={"packing": False}))
    _, findings = check_model(context.plan, base)
    assert [finding for finding in findings if finding.severity == "error"] == []
    world_size = context.plan.parallelism.world_size
    assert run_gang(context) == [0] * world_size
    loaded, info = AutoModelForCausalLM.from_pretrained(context.workspace.adapter, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    result = dict(loaded.named_parameters())
    for name, parameter in made.named_parameters():
        assert torch.equal(result[name], parameter) == (name == frozen), name


TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
CHAT = {"format": "Chat", "chatTemplate": TEMPLATE}


@pytest.mark.parametrize("named_by", ["manifest", "config.json"])
def test_an_adapter_loads_by_itself_with_the_tokenizer_it_was_trained_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named_by: str
) -> None:
    base = tmp_path / "models" / "tiny"
    write_tiny_llama(base, torch.float32)
    write_tokenizer(base)
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").write_text("the base's own, which is not what is trained")
    named = {"source": "pvc://models/tiny"}
    if named_by == "manifest":
        named["hubName"] = "org/tiny"
    else:
        settings = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps(settings | {"_name_or_path": "org/tiny"}))
    one_step = {"training": {"maxSteps": 1}, "parallelism": {"processesPerNode": 1}}
    context = run_context(tmp_path, tiny_spec(model=named, data=CHAT, **one_step))
    assert run_gang(context) == [0]
    result = context.workspace.adapter
    assert json.loads((result / "manifest.json").read_text())[BASE_KEY] == weights_digest(read_checkpoint(base))
    # As the Hub would answer for this name.
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "tiny").symlink_to(base)
    monkeypatch.chdir(tmp_path)
    loaded = AutoPeftModelForCausalLM.from_pretrained(result)
    assert loaded.peft_config["default"].base_model_name_or_path == "org/tiny"
    tokenizer, of_base = AutoTokenizer.from_pretrained(result), AutoTokenizer.from_pretrained(base)
    assert tokenizer.get_vocab() == of_base.get_vocab()
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<user>hi"
    assert tokenizer.chat_template == TEMPLATE


def test_a_whole_model_has_the_template_that_it_was_trained_with(tmp_path: Path) -> None:
    base = tmp_path / "models" / "tiny"
    write_tiny_llama(base, torch.float32)
    write_tokenizer(base)
    (base / "chat_template.jinja").write_text("the base's own")
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").write_text("the base's own for tools")
    one_step = {"training": {"maxSteps": 1}, "parallelism": {"processesPerNode": 1}}
    context = run_context(tmp_path, tiny_spec(method=FULL, data=CHAT, **one_step))
    assert run_gang(context) == [0]
    assert AutoTokenizer.from_pretrained(context.workspace.adapter).chat_template == TEMPLATE

"""The model is looked at without a weight being read, whatever its architecture."""

import pytest
import torch
from transformers import AutoConfig

from finetune_trainer.inspection.skeleton import attach_skeleton_adapters, load_skeleton
from finetune_trainer.model.adapters import attach
from finetune_trainer.model.dtypes import resolve_dtypes
from finetune_trainer.model.load import load_base_model, pack_layers, packed_dtype, stored_dtype
from finetune_trainer.preflight.model_process import check_model
from tests.support.declared_model import LLAMA_70B, declare_model
from tests.support.tiny_model import plan_of, tiny_spec

TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 128, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
KINDS = ("olmo2", "granite", "cohere", "starcoder2", "phi3", "mixtral", "qwen3_moe", "gpt2", "gpt_neox")


def test_a_model_of_700_gigabytes_is_looked_at_without_reading_it(tmp_path):
    declared = declare_model(tmp_path / "model", LLAMA_70B | {"num_hidden_layers": 8, "vocab_size": 40_000_000})
    assert declared > 700e9
    structure, findings = check_model(plan_of(tiny_spec()), tmp_path / "model")
    assert findings == []
    assert len(structure.fsdp_units) == 8
    assert structure.vocabulary_size == 40_000_000


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", [1, 2])
def test_any_architecture_is_accepted_from_its_configuration(tmp_path, kind, version):
    config = AutoConfig.for_model(kind, **TINY)
    declare_model(tmp_path / "model", config.to_dict() | {"dtype": "float32"})
    # PEFT takes all linear layers of these for their stacked experts, too, which version 1 cannot hold.
    targets = {"targetModules": ["q_proj"]} if version == 1 and kind in ("mixtral", "qwen3_moe") else {}
    method = {"type": "LoRA", "lora": {"r": 4, **targets}}
    plan = plan_of(tiny_spec(method=method, merge={"enabled": False}, parallelism={"fsdp": {"version": version}}))
    structure, findings = check_model(plan, tmp_path / "model")
    assert [finding for finding in findings if finding.severity == "error"] == []
    assert len(structure.fsdp_units) >= 2
    assert structure.trainable


@pytest.mark.parametrize("storage", ["bfloat16", "uint8", "float32"])
def test_4_bit_layers_have_the_names_shapes_and_types_of_real_ones(context, model, storage):
    plan = context({"method": {"type": "QLoRA", "quantization": {"quantStorage": storage}}, "model.dtype": "bfloat16"}).plan
    declared, findings = load_skeleton(plan, model)
    pack_layers(declared, plan.method.quantization, packed_dtype(plan, resolve_dtypes(plan, stored_dtype(model))))
    real = load_base_model(plan, model, torch.device("cpu"))

    def seen(each):
        return {name: (type(value), value.shape, value.dtype, value.requires_grad) for name, value in each.named_parameters()}

    assert findings == []
    assert seen(declared) == seen(real)


@pytest.mark.parametrize("storage", ["float16", "uint8"])
def test_adapters_that_follow_packed_weights_have_the_type_these_compute_in(context, model, storage):
    method = {"type": "QLoRA", "quantization": {"quantStorage": storage}, "lora": {"autocastAdapterDtype": False}}
    plan = context({"method": method, "model.dtype": "bfloat16"}).plan
    declared, _ = load_skeleton(plan, model)
    pack_layers(declared, plan.method.quantization, packed_dtype(plan, resolve_dtypes(plan, stored_dtype(model))))
    real = attach(load_base_model(plan, model, torch.device("cpu")), plan)

    def trained(adapted):
        return {name: value.dtype for name, value in adapted.named_parameters() if value.requires_grad}

    assert trained(attach_skeleton_adapters(declared, plan, model)) == trained(real)
    assert set(trained(real).values()) == {torch.bfloat16}

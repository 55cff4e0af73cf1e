"""Names that match nothing, or more than was meant: preflight looks at the model, because the rule book cannot."""

import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.oft.layer import OFTLayer

from finetune_job.api.method import MethodType
from finetune_job.plan.method_plan import AdapterPlan, MethodPlan
from finetune_trainer.preflight.attached import check_attached
from finetune_trainer.preflight.model_inspection import AttachedModel, ModelInspection
from finetune_trainer.preflight.module_names import wrong_method_settings
from tests.pitfalls.one_process import llama, peft_config, tokens, trained
from tests.support.tiny_model import plan_of, tiny_spec


def ranks(**settings) -> dict[str, int]:
    wanted = {"target_modules": ["q_proj", "v_proj"]} | settings
    model = get_peft_model(llama(), LoraConfig(task_type="CAUSAL_LM", r=4, **wanted))
    held = {name.split(".lora_A")[0]: p.shape[0] for name, p in model.named_parameters() if "lora_A" in name}
    return {name.split(".model.model.")[1]: rank for name, rank in held.items()}


def found(method: str, settings: dict[str, object]) -> set[str]:
    modules = [name for name, _ in llama().named_modules()]
    adapter = AdapterPlan(settings=settings, autocast_adapter_dtype=True)
    return {finding.rule for finding in wrong_method_settings(MethodType(method), adapter, modules)}


def attached(method: str, settings: dict[str, object]) -> set[str]:
    adapter = AdapterPlan(settings=settings, autocast_adapter_dtype=True)
    made = MethodPlan.model_construct(type=MethodType(method), lora=None, adapter=adapter, quantization=None)
    plan = plan_of(tiny_spec()).model_copy(update={"method": made})
    model = AttachedModel(get_peft_model(llama(), peft_config(method, settings)), {}, ())
    return {finding.rule for finding in check_attached(ModelInspection(plan, Path("model"), attached=model))}


def test_a_pattern_that_matches_nothing():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert set(ranks(rank_pattern={"q_porj": 8}).values()) == {4}
    assert any("did not match any targeted module" in str(each.message) for each in said)
    for pattern in ("rankPattern", "alphaPattern"):
        assert "adapter-pattern-unmatched" in found("LoHa", {pattern: {"q_porj": 8}})
        assert not found("LoHa", {pattern: {"q_proj": 8}})


@pytest.mark.parametrize("pattern", ["k_proj", "layers.1.self_attn.q_proj", "embed_tokens"])
def test_a_pattern_for_a_module_that_is_not_adapted(pattern):
    targets = {"r": 4, "targetModules": ["model.layers.0.self_attn.q_proj", "v_proj"]}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert attached("LoHa", {**targets, "rankPattern": {pattern: 8, "v_proj": 2}}) == {"adapter-pattern-unmatched"}
    assert any(f"ignored: ['{pattern}']" in str(each.message) for each in said)
    assert not attached("LoHa", {**targets, "rankPattern": {"layers.0.self_attn.q_proj": 8, "v_proj": 2}})
    # Of what the model does not have at all, the names themselves tell.
    assert not attached("LoHa", {**targets, "alphaPattern": {"q_porj": 8}})


def test_a_full_name_is_adapted_whatever_layers_are_chosen():
    first = "model.layers.0.self_attn.q_proj"
    assert set(ranks(layers_to_transform=[1], target_modules=[first, "v_proj"])) == {
        "layers.0.self_attn.q_proj",
        "layers.1.self_attn.v_proj",
    }
    assert found("LoHa", {"targetModules": [first], "layersToTransform": [1]}) == {"full-name-beside-layers"}
    assert found("LoHa", {"targetModules": [first], "layersToTransform": 1, "layersPattern": "layers"})
    # The end of a name is looked for in the layers that are chosen, and a full name in one of them is one that is meant.
    assert not found("LoHa", {"targetModules": ["0.self_attn.q_proj"], "layersToTransform": [0, 1]})
    assert not found("LoHa", {"targetModules": [first, "lm_head"], "layersToTransform": [0]})


def test_the_first_pattern_that_matches_counts():
    wide_first = ranks(rank_pattern={"q_proj": 8, "layers.0.self_attn.q_proj": 2})
    assert wide_first["layers.0.self_attn.q_proj"] == 8
    assert ranks(rank_pattern={"layers.0.self_attn.q_proj": 2, "q_proj": 8})["layers.0.self_attn.q_proj"] == 2
    assert "adapter-patterns-overlap" in found("LoHa", {"rankPattern": {"q_proj": 8, "layers.0.self_attn.q_proj": 2}})
    assert not found("LoHa", {"rankPattern": {"q_proj": 8, "v_proj": 2}})


def test_a_layer_beyond_the_model():
    assert set(ranks(layers_to_transform=[0, 5])) == {"layers.0.self_attn.q_proj", "layers.0.self_attn.v_proj"}
    assert "layer-number-unknown" in found("LoHa", {"targetModules": ["q_proj"], "layersToTransform": [0, 5]})
    assert "layer-number-unknown" in found("LoHa", {"targetModules": ["q_proj"], "layersToTransform": 5})
    assert not found("LoHa", {"targetModules": ["q_proj"], "layersToTransform": [0, 1]})


@pytest.mark.parametrize("setting", ["excludeModules", "modulesToSave"])
def test_names_of_no_module(setting):
    assert trained("LoHa", {"r": 4, setting: ["q_porj"]}).is_fine, "PEFT says so after all"
    (rule,) = found("LoHa", {setting: ["q_porj"]})
    assert rule in ("target-module-unknown", "saved-module-unknown")
    assert not found("LoHa", {setting: ["lm_head"]})


def test_a_saved_module_inside_an_adapter():
    """PEFT keeps the adapted layer as `base_layer`."""
    wrong, right = {"r": 4, "modulesToSave": ["base_layer"]}, {"r": 4, "modulesToSave": ["model.norm"]}
    model = get_peft_model(llama(), peft_config("LoHa", wrong))
    trained_whole = [name for name, each in model.named_parameters() if each.requires_grad and "q_proj.base_layer" in name]
    assert trained_whole
    assert "saved-module-inside-adapter" in attached("LoHa", wrong)
    assert not attached("LoHa", right)


def test_a_saved_module_named_by_its_end():
    model = get_peft_model(llama(), peft_config("LoHa", {"r": 4, "modulesToSave": ["norm"]}))
    saved = [name for name, p in model.named_parameters() if ".modules_to_save." in name and p.requires_grad]
    assert len(saved) == 5, "the last norm and two in each layer"
    assert "saved-module-by-its-end" in attached("LoHa", {"r": 4, "modulesToSave": ["norm"]})
    assert not attached("LoHa", {"r": 4, "modulesToSave": ["model.norm"]})


def test_an_adapter_without_values():
    assert trained("OFT", {"r": 32, "oftBlockSize": 0, "targetModules": ["q_proj"]}).trained == 0
    assert "adapter-without-values" in attached("OFT", {"r": 32, "oftBlockSize": 0, "targetModules": ["q_proj"]})
    assert not attached("OFT", {"r": 4, "oftBlockSize": 0, "targetModules": ["q_proj"]})


@pytest.mark.parametrize(
    ("written", "fitting"),
    [({"r": 0, "oftBlockSize": 7}, {"r": 0, "oftBlockSize": 8}), ({"r": 7, "oftBlockSize": 0}, {"r": 8, "oftBlockSize": 0})],
)
def test_blocks_of_another_size_than_was_written(written, fitting):
    """Those that PEFT takes in their place are the next that divide the width, of 32 channels here."""
    targets = {"targetModules": ["q_proj"]}
    models = [get_peft_model(llama(), peft_config("OFT", settings | targets)) for settings in (written, fitting)]
    sizes = [{layer.oft_block_size["default"] for layer in model.modules() if isinstance(layer, OFTLayer)} for model in models]
    assert sizes[0] == sizes[1]
    assert attached("OFT", written | targets) == {"adapter-blocks-of-another-size"}
    assert not attached("OFT", fitting | targets)


def test_feed_forward_modules_that_are_not_adapted(tmp_path):
    """PEFT fills in its own for the model whatever the targets are, and then does not load the adapter; ours can be loaded."""
    import json

    from peft import PeftModel

    from finetune_trainer.model.adapters import adapter_settings

    model = get_peft_model(llama(), peft_config("IA3", {"targetModules": ["q_proj"]}))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="should be a subset"):
        PeftModel.from_pretrained(llama(), tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter_settings(model, "base")))
    with torch.no_grad():
        loaded = PeftModel.from_pretrained(llama(), tmp_path)
        assert torch.equal(loaded(input_ids=tokens()).logits, model(input_ids=tokens()).logits)
    assert "feedforward-module-not-adapted" in attached("IA3", {"feedforwardModules": ["gate_proj"]})
    assert not attached("IA3", {"feedforwardModules": ["down_proj"]})

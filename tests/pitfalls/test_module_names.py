"""Names that match nothing: PEFT speaks only where all of them do."""

import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from tests.pitfalls.lab.build import adapted, load_base
from tests.pitfalls.lab.case import Case


def trained(**settings) -> set[str]:
    """Modules with an adapter or trained whole, by the last part of their names."""
    case = Case(adapter={"target_modules": ["q_proj"], **settings})
    names = [name for name, value in adapted(case, load_base(case)).named_parameters() if value.requires_grad]
    return {name.split(".lora_")[0].split(".modules_to_save")[0].rsplit(".", 1)[-1] for name in names}


def test_one_wrong_name_beside_a_right_one_is_dropped_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert trained(target_modules=["q_proj", "v_porj"]) == {"q_proj"}
        assert trained(modules_to_save=["lm_haed"]) == {"q_proj"}
    assert trained(target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]) == {"q_proj", "v_proj", "lm_head"}


def test_a_total_miss_is_an_error():
    with pytest.raises(ValueError, match="not found in the base model"):
        trained(target_modules=["v_porj"])


def adapts_experts(model: str, **adapter) -> bool:
    case = Case(model=model, adapter={"target_modules": ["q_proj"], **adapter})
    return any("experts" in name for name, value in adapted(case, load_base(case)).named_parameters() if value.requires_grad)


def test_names_of_linear_layers_reach_fused_experts_only_where_they_are_the_architectures_own():
    """transformers turns the names of the projections that it fuses into target_parameters; other names match nothing."""
    assert adapts_experts("qwen3_moe", target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
    assert adapts_experts("qwen3_moe", target_modules="all-linear")
    assert not adapts_experts("mixtral", target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
    assert adapts_experts("mixtral", target_modules=["q_proj", "w1", "w2", "w3"])
    assert adapts_experts("mixtral", target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    with pytest.raises(ValueError, match="without also targeting gate_proj"):
        adapts_experts("qwen3_moe", target_modules=["up_proj"])


@pytest.mark.parametrize("settings", [{"lora_dropout": 0.1}, {"use_dora": True}])
def test_adapters_on_parameters_take_neither_dropout_nor_dora(settings):
    fused = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}
    case = Case(model="qwen3_moe", adapter={**fused, **settings})
    with pytest.raises(ValueError, match=r"lora.ParamWrapper does not work with"):
        adapted(case, load_base(case))


def test_an_adapter_whose_names_do_not_match_is_loaded_as_nothing(tmp_path):
    model = adapted(Case(), load_base(Case()))
    model.save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    save_file({f"_orig_mod.{name}": value for name, value in load_file(path).items()}, path)
    with pytest.warns(UserWarning, match="Found missing adapter keys"):
        loaded = PeftModel.from_pretrained(load_base(Case()), tmp_path)
    assert not any(bool(value.any()) for name, value in loaded.named_parameters() if "lora_B" in name)


def test_a_model_without_known_names_needs_them():
    with pytest.raises(ValueError, match="target_modules"):
        get_peft_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), LoraConfig())

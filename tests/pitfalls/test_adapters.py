"""What PEFT does with names and numbers that are not quite right: mostly nothing, and without a word."""

from __future__ import annotations

import re

import pytest
import torch

from tests.pitfalls.cases import Case, load_base
from tests.pitfalls.manifests import findings


def adapted_modules(base, **settings) -> set[str]:
    """Last part of the names of the modules that got an adapter."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(load_base(Case(), base), LoraConfig(task_type="CAUSAL_LM", r=4, **settings))
    return {name.split(".lora_A")[0].rsplit(".", 1)[-1] for name, _ in model.named_parameters() if ".lora_A" in name}


def test_all_linear_beside_names_is_a_name(base):
    assert adapted_modules(base, target_modules=["all-linear", "q_proj"]) == {"q_proj"}
    assert "all-linear-beside-names" in findings(type="LoRA", lora={"targetModules": ["all-linear", "q_proj"]})
    assert adapted_modules(base, target_modules="all-linear") > {"q_proj", "up_proj"}
    assert not findings(type="LoRA", lora={"targetModules": ["all-linear"]})


@pytest.mark.parametrize("wrong", ["v_proj ", "", "k_proj,v_proj"])
def test_malformed_names_match_nothing(base, wrong):
    assert adapted_modules(base, target_modules=["q_proj", wrong]) == {"q_proj"}
    assert "module-name-malformed" in findings(type="LoRA", lora={"targetModules": ["q_proj", wrong]})
    assert adapted_modules(base, target_modules=["q_proj", "v_proj"]) == {"q_proj", "v_proj"}
    assert not findings(type="LoRA", lora={"targetModules": ["q_proj", "v_proj"]})


def test_a_module_that_is_saved_whole_gets_no_adapter(base):
    assert adapted_modules(base, target_modules=["q_proj", "lm_head"], modules_to_save=["lm_head"]) == {"q_proj"}
    both = {"targetModules": ["q_proj", "lm_head"], "modulesToSave": ["lm_head"]}
    assert "module-adapted-and-saved" in findings(type="LoRA", lora=both)
    assert adapted_modules(base, target_modules=["q_proj"], modules_to_save=["lm_head"]) == {"q_proj"}
    assert not findings(type="LoRA", lora={"targetModules": ["q_proj"], "modulesToSave": ["lm_head"]})


def test_pattern_keys_are_regular_expressions(base):
    with pytest.raises(re.error):
        adapted_modules(base, target_modules=["q_proj"], rank_pattern={"(q_proj": 8})
    assert "adapter-pattern-malformed" in findings(type="LoRA", lora={"rankPattern": {"(q_proj": 8}})
    assert adapted_modules(base, target_modules=["q_proj"], rank_pattern={"q_proj": 8}) == {"q_proj"}
    assert not findings(type="LoRA", lora={"rankPattern": {"q_proj": 8}})


def test_dropout_of_1_blocks_and_above_1_is_refused():
    assert not torch.nn.Dropout(1.0)(torch.ones(8)).any()
    with pytest.raises(ValueError, match="between 0 and 1"):
        torch.nn.Dropout(1.5)
    for written in ("1", "1.5"):
        assert "lora-dropout-range" in findings(type="LoRA", lora={"loraDropout": written})
    assert not findings(type="LoRA", lora={"loraDropout": "0.99"})

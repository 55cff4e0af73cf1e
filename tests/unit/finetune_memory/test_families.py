"""Parameters from config.json alone against transformers' own classes at real sizes, on the meta device."""

import json
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.pytorch_utils import Conv1D

from finetune_memory.families import LAYER_CLASSES, PARAMETERS_BY_TYPE, base_parameters
from finetune_memory.model_shape import EAGER_ONLY, UnknownModelError, facts_of
from tests.unit.finetune_memory.configs import CONFIGS


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_name_shape_and_kind_equals_the_real_model(name: str) -> None:
    config = CONFIGS[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(_config(config))
    found = base_parameters(config, "bfloat16")
    assert [(each.name, each.shape) for each in found] == [(name, tuple(each.shape)) for name, each in model.named_parameters()]
    modules = dict(model.named_modules())
    kinds = {each.name: each.kind for each in found}
    for each in found:
        module = modules[each.module] if each.name.endswith(".weight") else None
        classes = {nn.Linear: "linear", Conv1D: "transposed"}
        assert kinds[each.name] == classes.get(type(module), "embedding" if isinstance(module, nn.Embedding) else "other"), (
            each.name
        )
    assert sum(each.numel for each in found) == model.num_parameters()
    assert LAYER_CLASSES[config["model_type"]] in model._no_split_modules
    facts = facts_of(config)
    assert facts.has_fused_attention == model._supports_sdpa
    assert facts.is_stored_otherwise == bool(get_model_conversion_mapping(model, add_legacy=False))


@pytest.mark.parametrize("kind", sorted(EAGER_ONLY))
def test_models_without_fused_attention_are_those_of_transformers(kind: str) -> None:
    found = AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[kind]]
    assert not all(each._supports_sdpa for each in (found if isinstance(found, list | tuple) else (found,)))


def test_every_family_is_measured() -> None:
    assert {config["model_type"] for config in CONFIGS.values()} == set(PARAMETERS_BY_TYPE) == set(LAYER_CLASSES)


def test_an_unknown_family_says_what_would_help() -> None:
    with pytest.raises(UnknownModelError, match=r"'mamba' .*--model"):
        base_parameters({"model_type": "mamba", "hidden_size": 8}, "float32")


def test_a_missing_setting_is_named() -> None:
    with pytest.raises(UnknownModelError, match="intermediate_size"):
        base_parameters(
            {name: value for name, value in CONFIGS["Llama-3.2-1B"].items() if name != "intermediate_size"}, "float32"
        )


def _config(settings: dict[str, Any]) -> Any:
    # Through JSON, as a file would come.
    settings = json.loads(json.dumps(settings))
    return CONFIG_MAPPING[settings["model_type"]](**{name: value for name, value in settings.items() if name != "model_type"})

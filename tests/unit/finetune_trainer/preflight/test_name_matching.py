"""Names and patterns match as PEFT matches them."""

import re

import pytest
from peft import LoHaConfig, LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from finetune_trainer.preflight.module_names import wrong_module_names
from tests.unit.finetune_trainer.preflight.test_module_names import ADAPTABLE, MODULES, lora, settings_findings


@pytest.mark.parametrize(
    "name", ["q_proj", "proj", "mlp.up_proj", "up", "model.layers.0.q_proj", "ayers.0.q_proj", "lm_head", "0.q_proj"]
)
def test_a_target_is_found_exactly_where_peft_finds_it(name):
    found_by_peft = any(check_target_module_exists(LoraConfig(target_modules=[name]), module) for module in ADAPTABLE)
    assert (wrong_module_names(lora(target_modules=(name,)), ADAPTABLE, MODULES) == []) is bool(found_by_peft)


@pytest.mark.parametrize("pattern", ["q_proj", r"layers\.\d+\.q_proj", "proj", ".*proj", "q_proj.weight", "layers.1"])
def test_a_pattern_matches_exactly_where_pefts_does(pattern):
    found_by_peft = any(get_pattern_key([pattern], module) == pattern for module in ADAPTABLE)
    assert (wrong_module_names(lora(rank_pattern={pattern: 4}), ADAPTABLE, MODULES) == []) is found_by_peft


@pytest.mark.parametrize("text", ["q_proj", r".*\.q_proj", "layers", r".*mlp\..*", "nothing", "(up"])
def test_a_text_of_modules_to_exclude_matches_where_pefts_does(text):
    """PEFT only warns of one that excludes nothing."""
    try:
        config = LoHaConfig(target_modules=".*", exclude_modules=text)
        excluded = any(not check_target_module_exists(config, module) for module in MODULES)
    except re.error:
        excluded = False
    findings = settings_findings(excludeModules=text)
    assert (findings == []) is excluded
    assert all((each.rule, each.field) == ("target-module-unknown", "spec.method.settings.excludeModules") for each in findings)


@pytest.mark.parametrize("pattern", ["layers", ["h", "layers"], "model.layers", ".*", "h", "q_proj", "("])
@pytest.mark.parametrize("layers", [0, [0, 10], [0, 9], [10]])
def test_layers_are_counted_behind_the_pattern_as_peft_does(pattern, layers):
    config = LoHaConfig(target_modules=["q_proj"], layers_to_transform=layers, layers_pattern=pattern)
    written = layers if isinstance(layers, list) else [layers]
    try:
        adapted = [module for module in MODULES if check_target_module_exists(config, module)]
    except re.error:
        adapted = []
    is_whole = all(any(f".{layer}." in module for module in adapted) for layer in written)
    findings = settings_findings(targetModules=["q_proj"], layersToTransform=layers, layersPattern=pattern)
    assert (findings == []) is is_whole

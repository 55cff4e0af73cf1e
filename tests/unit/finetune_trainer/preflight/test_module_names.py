"""Every name that matches nothing in the model, or too much, is found, and what to write instead."""

import pytest

from finetune_job.api.method import LoraBias, LoraInit, MethodType
from finetune_job.plan.method_plan import AdapterPlan, LoraPlan
from finetune_trainer.preflight.module_names import wrong_method_settings, wrong_module_names
from tests.support.tiny_model import plan_of, tiny_spec

ADAPTABLE = ("embed_tokens", "model.layers.0.q_proj", "model.layers.0.mlp.up_proj", "model.layers.10.q_proj", "lm_head")
MODULES = ("", "model", "model.layers", "model.layers.0", "model.layers.0.mlp", "norm", *ADAPTABLE)


def lora(**changes):
    settings = {
        "r": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "target_modules": ("all-linear",),
        "target_parameters": (),
        "modules_to_save": (),
        "trainable_token_indices": (),
        "rank_pattern": {},
        "alpha_pattern": {},
        "exclude_modules": (),
        "layers_to_transform": None,
        "init_lora_weights": LoraInit.ZERO_B,
        "lora_plus_ratio": None,
        "use_rslora": False,
        "use_dora": False,
        "bias": LoraBias.NONE,
        "autocast_adapter_dtype": True,
    }
    return LoraPlan(**settings | changes)


def test_a_full_name_outside_the_chosen_layers_is_refused():
    named = lora(target_modules=("model.layers.10.q_proj", "up_proj", "lm_head"), layers_to_transform=(0,))
    (finding,) = wrong_module_names(named, ADAPTABLE, MODULES)
    assert (finding.rule, finding.severity, finding.field) == (
        "full-name-beside-layers",
        "error",
        "spec.method.lora.layersToTransform",
    )
    assert (finding.value, "model.layers.10.q_proj" in finding.message) == ("[0]", True)
    assert {change.field: change.value for change in finding.changes} == {"spec.method.lora.layersToTransform": [0, 10]}
    chosen = named.model_copy(update={"layers_to_transform": (0, 10)})
    assert wrong_module_names(chosen, ADAPTABLE, MODULES) == []


def test_a_pattern_that_is_no_regular_expression_matches_nothing():
    (finding,) = wrong_module_names(lora(alpha_pattern={"q_proj(": 4}), ADAPTABLE, MODULES)
    assert (finding.rule, finding.field) == ("adapter-pattern-unmatched", "spec.method.lora.alphaPattern")


def settings_findings(**settings):
    return wrong_method_settings(MethodType.LOHA, AdapterPlan(settings=settings, autocast_adapter_dtype=True), MODULES)


def test_a_name_in_place_of_a_list_is_mended_to_a_list():
    (finding,) = settings_findings(excludeModules="q_proj")
    assert finding.changes[0].value == ["q_proj"]
    assert settings_findings(excludeModules="", targetModules="all-linear") == []


def test_layers_and_exclusions_that_do_not_exist_are_found():
    assert wrong_module_names(lora(layers_to_transform=(0, 10), exclude_modules=("q_proj",)), ADAPTABLE, MODULES) == []
    findings = wrong_module_names(lora(layers_to_transform=(0, 3), exclude_modules=("q_porj",)), ADAPTABLE, MODULES)
    assert [(finding.field.rsplit(".", 1)[1], finding.value) for finding in findings] == [
        ("excludeModules", "q_porj"),
        ("layersToTransform", "3"),
    ]


def test_every_wrong_name_is_reported():
    wrong = lora(target_modules=("q_prj", "q_proj", "zzz"), modules_to_save=("norm", "nrm"), rank_pattern={"zzz": 1})
    assert [finding.value for finding in wrong_module_names(wrong, ADAPTABLE, MODULES)] == ["q_prj", "zzz", "nrm", "zzz"]


def test_the_plan_has_patterns_in_the_order_of_the_written_adapter():
    """Of two that match the first counts; another order than the file's would give whoever loads the adapter another scale."""
    patterns = {"q_proj": 5, "layers.1.self_attn.q_proj": 90}
    lora = plan_of({**tiny_spec(), "method": {"type": "LoRA", "lora": {"alphaPattern": patterns, "rankPattern": patterns}}})
    loha = plan_of({**tiny_spec(), "method": {"type": "LoHa", "settings": {"rankPattern": patterns}}})
    held = (lora.method.lora.alpha_pattern, lora.method.lora.rank_pattern, loha.method.adapter.settings["rankPattern"])
    for each in held:
        assert list(each) == sorted(patterns)


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"exclude_modules": ("q_proj",)}, "target-module-excluded"),
        ({"modules_to_save": ("q_proj",)}, "target-module-saved-whole"),
    ],
)
def test_a_target_of_which_nothing_is_left_is_a_warning(settings, rule):
    (finding,) = wrong_module_names(lora(target_modules=("q_proj", "up_proj"), **settings), ADAPTABLE, MODULES)
    assert (finding.rule, finding.severity, finding.value) == (rule, "warning", "q_proj")
    assert wrong_module_names(lora(target_modules=("proj", "up_proj"), **settings), ("a.proj", *ADAPTABLE), MODULES) == []

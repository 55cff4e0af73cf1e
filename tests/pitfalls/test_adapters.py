"""What PEFT does with names and numbers that are not quite right: mostly nothing, and without a word."""

import re

import pytest
import torch

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import JobIdentity, RunPlan
from finetune_trainer.errors import ConfigError
from finetune_trainer.model.adapters import attach
from finetune_trainer.preflight.expressions import uncompiled_expressions
from tests.pitfalls.lab.build import load_base
from tests.pitfalls.lab.case import Case
from tests.pitfalls.manifests import findings, manifest, plans
from tests.pitfalls.one_process import judged, llama, tokens, trained


def adapted_modules(**settings) -> set[str]:
    """Last part of the names of the modules that got an adapter."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(load_base(Case()), LoraConfig(task_type="CAUSAL_LM", r=4, **settings))
    return {name.split(".lora_A")[0].rsplit(".", 1)[-1] for name, _ in model.named_parameters() if ".lora_A" in name}


def test_all_linear_beside_names_is_a_name():
    assert adapted_modules(target_modules=["all-linear", "q_proj"]) == {"q_proj"}
    assert "all-linear-beside-names" in findings(type="LoRA", lora={"targetModules": ["all-linear", "q_proj"]})
    assert adapted_modules(target_modules="all-linear") > {"q_proj", "up_proj"}
    assert not findings(type="LoRA", lora={"targetModules": ["all-linear"]})


@pytest.mark.parametrize("wrong", ["v_proj ", "", "k_proj,v_proj"])
def test_malformed_names_match_nothing(wrong):
    assert adapted_modules(target_modules=["q_proj", wrong]) == {"q_proj"}
    assert "module-name-malformed" in findings(type="LoRA", lora={"targetModules": ["q_proj", wrong]})
    assert adapted_modules(target_modules=["q_proj", "v_proj"]) == {"q_proj", "v_proj"}
    assert not findings(type="LoRA", lora={"targetModules": ["q_proj", "v_proj"]})


def test_a_module_that_is_saved_whole_gets_no_adapter():
    assert adapted_modules(target_modules=["q_proj", "lm_head"], modules_to_save=["lm_head"]) == {"q_proj"}
    both = {"targetModules": ["q_proj", "lm_head"], "modulesToSave": ["lm_head"]}
    assert "module-adapted-and-saved" in findings(type="LoRA", lora=both)
    assert adapted_modules(target_modules=["q_proj"], modules_to_save=["lm_head"]) == {"q_proj"}
    assert not findings(type="LoRA", lora={"targetModules": ["q_proj"], "modulesToSave": ["lm_head"]})


def test_pattern_keys_are_regular_expressions():
    with pytest.raises(re.error):
        adapted_modules(target_modules=["q_proj"], rank_pattern={"(q_proj": 8})
    assert "adapter-pattern-malformed" in findings(type="LoRA", lora={"rankPattern": {"(q_proj": 8}})
    with pytest.raises(re.error, match="bad character range"):
        adapted_modules(target_modules=["q_proj"], rank_pattern={"[z-a]_proj": 8})
    assert "adapter-pattern-malformed" in found_in_preflight({"type": "LoRA", "lora": {"rankPattern": {"[z-a]_proj": 8}}})
    assert not found_in_preflight({"type": "LoRA", "lora": {"rankPattern": {"[a-z]_proj": 8}}})
    assert adapted_modules(target_modules=["q_proj"], rank_pattern={"q_proj": 8}) == {"q_proj"}
    assert not findings(type="LoRA", lora={"rankPattern": {"q_proj": 8}})


def found_in_preflight(method: dict[str, object]) -> set[str]:
    """Ids of what is found where expressions are compiled: neither operator nor command line does it."""
    plan = resolve(
        JobIdentity(namespace="", name="", uid=""), FineTuneJobSpec.model_validate(manifest() | {"method": method}), None
    )
    return {finding.rule for finding in uncompiled_expressions(plan.method)}


def test_dropout_of_1_blocks_and_above_1_is_refused():
    assert not torch.nn.Dropout(1.0)(torch.ones(8)).any()
    with pytest.raises(ValueError, match="between 0 and 1"):
        torch.nn.Dropout(1.5)
    wrong, right = plans("lora-dropout-range", {"method.lora.loraDropout": "1"})
    assert not learns(wrong)
    assert learns(right)
    wrong, right = plans("lora-dropout-range", {"method.lora.loraDropout": "1.5"})
    with pytest.raises(ConfigError, match="between 0 and 1"):
        learns(wrong)
    assert learns(right)
    assert findings(type="LoRA", lora={"loraDropout": "0.99"}) == {"dropout-unusual"}, "a warning"
    assert not findings(type="LoRA", lora={"loraDropout": "0.49"})


def learns(plan: RunPlan) -> bool:
    """Whether an adapter that our trainer attaches gets a gradient."""
    model = attach(llama(), plan)
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    return any(value.grad is not None and bool(value.grad.any()) for name, value in model.named_parameters() if "lora_B" in name)


def test_a_text_in_place_of_names_is_an_expression():
    rule = "module-expression-malformed"
    assert "unterminated subpattern" in trained("LoHa", {"r": 4, "targetModules": "(q_proj"}).error
    assert rule in ids_of("LoHa", {"targetModules": "(q_proj"})
    assert "bad character range" in trained("LoHa", {"r": 4, "targetModules": "[z-a]_proj"}).error
    assert found_in_preflight({"type": "LoHa", "settings": {"targetModules": "[z-a]_proj"}}) == {rule}
    assert not found_in_preflight({"type": "LoHa", "settings": {"targetModules": ".*q_proj"}})
    assert trained("LoHa", {"r": 4, "targetModules": ".*q_proj"}).adapted == {"q_proj"}
    assert rule not in ids_of("LoHa", {"targetModules": ".*q_proj"})


def test_a_module_that_is_excluded_gets_no_adapter():
    rule, both = "module-adapted-and-excluded", {"targetModules": ["q_proj", "v_proj"], "excludeModules": ["q_proj"]}
    assert adapted_modules(target_modules=["q_proj", "v_proj"], exclude_modules=["q_proj"]) == {"v_proj"}
    assert rule in findings(type="LoRA", lora=both)
    assert "q_proj" not in adapted_modules(target_modules="all-linear", exclude_modules=["q_proj"])
    assert rule not in findings(type="LoRA", lora={"excludeModules": ["q_proj"]})


def test_an_orthogonal_start_needs_an_even_rank():
    rule = "orthogonal-odd-rank"
    for odd in ({"rank_pattern": {"q_proj": 3}}, {"rank_pattern": {"q_proj": 5}}):
        with pytest.raises(ValueError, match="requires the LoRA rank to be even"):
            adapted_modules(target_modules=["q_proj"], init_lora_weights="orthogonal", **odd)
    orthogonal = {"initLoraWeights": "orthogonal"}
    for odd in ({"targetModules": ["q_proj"], "rankPattern": {"q_proj": 3}}, {"r": 5}):
        wrong, right = plans(rule, {"method.lora": {**orthogonal, **odd}})
        with pytest.raises(ConfigError, match="requires the LoRA rank to be even"):
            learns(wrong)
        assert learns(right)
    assert adapted_modules(target_modules=["q_proj"], init_lora_weights="orthogonal") == {"q_proj"}
    assert rule not in findings(type="LoRA", lora={**orthogonal, "r": 4})


def test_layers_are_chosen_among_named_modules():
    rule, layers = "layers-without-targets", {"layersToTransform": [0]}
    with pytest.raises(ValueError, match="cannot be used when `target_modules` is a str"):
        adapted_modules(target_modules="all-linear", layers_to_transform=[0])
    assert rule in findings(type="LoRA", lora=layers)
    whole = trained("LoHa", {"r": 4})
    assert trained("LoHa", {"r": 4, **layers}).trained == whole.trained, "PEFT leaves the other layers out after all"
    assert rule in ids_of("LoHa", layers)
    named = {"r": 4, "targetModules": ["q_proj"]}
    assert trained("LoHa", {**named, **layers}).trained * 2 == trained("LoHa", named).trained
    assert rule not in ids_of("LoHa", {**named, **layers})


def test_no_module_is_named():
    """An empty list is PEFT's form for adapters on parameters alone."""
    with pytest.raises(ValueError, match="No `target_modules` passed but also no `target_parameters` found"):
        adapted_modules(target_modules=[])
    rule, parameters = "target-modules-empty", {"targetParameters": ["q_proj.weight"]}
    wrong, right = plans(rule, {"method.lora.targetModules": []})
    assert wrong.method.lora is not None
    assert (wrong.method.lora.target_modules, right.method.lora.target_modules) == ((), ("all-linear",))
    assert learns(right)
    spec = {"type": "LoRA", "lora": {"targetModules": [], **parameters}}
    assert rule not in findings(**spec)
    assert not findings(**spec), "PEFT documents this form"


def ids_of(method: str, settings: dict[str, object]) -> set[str]:
    return {finding.rule for finding in judged({"method.type": method, "method.settings": settings})}

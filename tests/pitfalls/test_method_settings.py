"""`method.settings`: what PEFT does with names, types and values that are not its own. Each row of the rules' tables is run."""

from typing import Any

import pytest
import torch
from peft import get_peft_model

from finetune_job.api.method import MethodType
from finetune_job.method_settings import known_settings
from finetune_job.methods import METHODS, Family, supported
from finetune_job.rules.method_configuration.setting_conflicts import SETTING_CONFLICTS
from finetune_job.rules.method_configuration.setting_limits import SETTING_LIMITS
from finetune_trainer.model.adapters import config_class
from tests.pitfalls.one_process import fixed, judged, llama, peft_config, trained
from tests.support.method_settings import SETTINGS

FITTING: dict[str, dict[str, Any]] = {**SETTINGS, "TrainableTokens": {"tokenIndices": [3, 40]}}
NEEDED = {"layersToTransform": {"targetModules": ["q_proj"]}}
"""What a setting needs besides it to mean anything."""


def method_settings(method: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Changes of the plain manifest."""
    return {"method.type": method, "method.settings": settings, "merge.enabled": False}


def ids(method: str, settings: dict[str, Any]) -> set[str]:
    return {finding.rule for finding in judged(method_settings(method, settings))}


def after_the_fix(method: str, settings: dict[str, Any], rule: str) -> dict[str, Any]:
    """The settings that the fix leaves."""
    spec = fixed(method_settings(method, settings), rule)
    written: dict[str, Any] = spec["method"]["settings"]
    assert rule not in ids(method, written)
    return written


def test_an_unknown_setting():
    rule, wrong = "method-setting-unknown", {"R": 8}
    with pytest.raises(TypeError, match="unexpected keyword argument 'R'"):
        config_class(MethodType.LOHA)(task_type="CAUSAL_LM", **wrong)
    assert rule in ids("LoHa", wrong)
    assert after_the_fix("LoHa", wrong, rule) == {"r": 8}
    assert trained("LoHa", {"r": 8}).is_fine


def test_a_setting_of_another_type():
    rule, wrong = "method-setting-type", {"saveProjection": "false"}
    # PEFT takes the text for true: the projections are saved although it says not to.
    assert config_class(MethodType.VERA)(task_type="CAUSAL_LM", save_projection="false").save_projection
    assert rule in ids("VeRA", wrong)
    assert after_the_fix("VeRA", wrong, rule) == {"saveProjection": False}
    assert peft_config("VeRA", {"saveProjection": False}).save_projection is False


def beyond() -> list[Any]:
    """Where many methods share a setting, the first stands for all that have the same limit."""
    cases = []
    for limit in SETTING_LIMITS:
        for setting in limit.settings:
            kinds = [
                kind for kind in supported(Family.OTHER) if limit.applies_to(kind, setting) and setting in known_settings(kind)
            ]
            method = kinds[0].value
            cases += [pytest.param(method, setting, value, id=f"{method}-{setting}-{value}") for value in limit.examples]
    return cases


@pytest.mark.parametrize(("method", "setting", "value"), beyond())
def test_values_beyond_a_limit(method: str, setting: str, value: Any):
    rule = "method-setting-range"
    fitting = {**FITTING.get(method, {}), **NEEDED.get(setting, {})}
    wrong = {**fitting, setting: value}
    assert rule in ids(method, wrong)
    assert not happens_nothing(method, wrong, fitting)
    kept = after_the_fix(method, wrong, rule)
    outcome = trained(method, {**fitting, **{name: given for name, given in kept.items() if name == setting}})
    assert not outcome.error
    assert outcome.is_finite
    assert outcome.trained


def happens_nothing(method: str, wrong: dict[str, Any], fitting: dict[str, Any]) -> bool:
    """Whether training with these settings goes as well as with fitting ones."""
    if method == "BOFT" and "boftNButterflyFactor" in wrong:
        # Whether PEFT's extension can be compiled decides what the adapter is; its settings claim the same in both cases.
        return bool(peft_config(method, wrong).boft_n_butterfly_factor == 1)
    if method == "TrainableTokens":
        return trained(method, wrong).trained == trained(method, {"tokenIndices": sorted(set(wrong["tokenIndices"]))}).trained
    outcome = trained(method, wrong)
    if outcome.error or not outcome.is_finite or not outcome.trained:
        return False
    return len(outcome.without_gradient) <= len(trained(method, fitting).without_gradient)


def conflicts() -> list[Any]:
    return [
        pytest.param(conflict.methods[0].value, dict(example), id=f"{conflict.methods[0].value}-{conflict.setting}-{number}")
        for conflict in SETTING_CONFLICTS
        for number, example in enumerate(conflict.examples)
    ]


@pytest.mark.parametrize(("method", "wrong"), conflicts())
def test_settings_that_contradict_each_other(method: str, wrong: dict[str, Any]):
    rule = "method-settings-conflict"
    assert rule in ids(method, wrong)
    outcome = trained(method, wrong)
    assert outcome.error or not outcome.is_finite or not starts_at_the_base(method, wrong)
    kept = after_the_fix(method, wrong, rule)
    # PEFT's own sizes are made for larger models than this one.
    outcome = trained(method, {**{name: v for name, v in FITTING.get(method, {}).items() if name not in wrong}, **kept})
    assert not outcome.error
    assert outcome.is_finite


def starts_at_the_base(method: str, settings: dict[str, Any]) -> bool:
    ids_ = torch.arange(8)[None]
    with torch.no_grad():
        plain = llama().eval()(input_ids=ids_).logits
        adapted = get_peft_model(llama(), peft_config(method, settings)).eval()(input_ids=ids_).logits
    return torch.allclose(plain, adapted, atol=1e-4)


@pytest.mark.parametrize(("method", "setting", "value", "neighbour"), [("OFT", "moduleDropout", "0.5", "LoHa")])
def test_settings_without_effect(method: str, setting: str, value: Any, neighbour: str):
    rule = "no-effect-method-setting"
    assert same(trained(method, FITTING[method]).logits, trained(method, {**FITTING[method], setting: value}).logits)
    assert rule in ids(method, {setting: value})
    assert not same(
        trained(neighbour, FITTING[neighbour]).logits, trained(neighbour, {**FITTING[neighbour], setting: value}).logits
    )
    assert rule not in ids(neighbour, {setting: value})


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    assert one is not None
    assert other is not None
    return torch.equal(one, other)


def test_what_the_table_of_limits_leaves_alone():
    """Values just inside of each limit that has a number are trained by PEFT, too."""
    for method in ("LoHa", "OFT", "BOFT"):
        assert trained(method, FITTING[method]).is_fine
        assert not {rule for rule in ids(method, FITTING[method]) if rule.startswith("method-setting")}
        assert not METHODS[MethodType(method)].refused

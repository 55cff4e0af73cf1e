"""Settings of a method -> fields of PEFT's configuration, or what is wrong with them."""

import pytest

from finetune_job.api.method import MethodType
from finetune_job.method_settings import effective_settings, known_settings, peft_fields


def test_settings_become_fields_with_numbers_for_fractions() -> None:
    fields, wrong = peft_fields(MethodType.LOHA, {"r": 4, "moduleDropout": "0.25", "targetModules": ["q_proj"]})
    assert wrong == []
    assert fields == {"r": 4, "module_dropout": 0.25, "target_modules": ["q_proj"]}


@pytest.mark.parametrize("settings", [{}, {"targetModules": ["all-linear"]}])
def test_without_names_every_linear_layer_is_a_target(settings: dict[str, list[str]]) -> None:
    assert peft_fields(MethodType.LOHA, settings)[0] == {"target_modules": "all-linear"}


def test_an_unknown_name_is_answered_with_the_one_that_was_meant() -> None:
    fields, (wrong,) = peft_fields(MethodType.LOHA, {"targetModule": ["q_proj"], "targetModules": ["v_proj"]})
    assert fields == {"target_modules": ["v_proj"]}
    assert (wrong.name, wrong.is_unknown, wrong.near) == ("targetModule", True, "targetModules")
    assert wrong.reason == "PEFT's configuration of LoHa has no targetModule"
    assert wrong.fix.startswith("did you mean targetModules")


def test_a_value_of_another_type_is_refused_with_what_the_setting_takes() -> None:
    fields, (wrong,) = peft_fields(MethodType.LOHA, {"r": "many", "targetModules": ["q_proj"]})
    assert "r" not in fields
    assert (wrong.reason, wrong.is_unknown) == ("r of LoHa takes a whole number", False)
    assert peft_fields(MethodType.LOHA, {"r": True})[1][0].name == "r"


def test_a_setting_comes_to_its_value_or_to_the_default() -> None:
    settings = effective_settings(MethodType.LOHA, {"moduleDropout": "0.5", "targetModules": None})
    assert (settings["moduleDropout"], settings["r"], settings["targetModules"]) == (0.5, 8, "all-linear")


def test_lora_has_its_own_section_and_no_settings() -> None:
    assert known_settings(MethodType.FULL) == {}

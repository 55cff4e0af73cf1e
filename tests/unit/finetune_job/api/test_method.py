"""Free-form settings of a method: what they may hold."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from finetune_job.api.method import MethodSpec


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"moduleDropout": 0.1}, 'write "0.1" in quotes'),
        ({"rankPattern": {"q_proj": [1.5]}}, "rankPattern.q_proj"),
        ({"target_modules": ["q_proj"]}, "camelCase"),
        ({f"setting{number}": 1 for number in range(65)}, "64"),
    ],
)
def test_settings_of_a_method_hold_no_floats_and_only_names_of_settings(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(said)):
        MethodSpec.model_validate({"type": "LoHa", "settings": settings})


def test_settings_of_a_method_survive_the_plan() -> None:
    settings = {"r": 8, "targetModules": ["q_proj"], "moduleDropout": "0.1", "useEffectiveConv2d": False}
    assert MethodSpec.model_validate({"type": "LoHa", "settings": settings}).settings == settings

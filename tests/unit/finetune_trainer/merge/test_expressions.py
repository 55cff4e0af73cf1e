"""A regular expression that never ends is refused, and plain names are not tried."""

from typing import Any

import pytest

from finetune_trainer.merge import expressions
from finetune_trainer.merge.expressions import require_expressions_that_end
from finetune_trainer.weights.errors import UnsupportedAdapterError

MODULES = [f"model.layers.{number}.self_attn.{name}_proj" for number in range(8) for name in "qkvo"]
ENDLESS = "(.*)*q_proj(.*)*x"


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"target_modules": ENDLESS}, "target_modules"),
        ({"target_modules": ["q_proj"], "exclude_modules": ENDLESS}, "exclude_modules"),
        ({"target_modules": ["q_proj"], "feedforward_modules": ENDLESS}, "feedforward_modules"),
        ({"rank_pattern": {"v_proj": 4, ENDLESS: 8}}, "rank_pattern"),
        ({"alpha_pattern": {ENDLESS: 8}}, "alpha_pattern"),
        ({"modules_to_save": [ENDLESS]}, "modules_to_save"),
        ({"layers_pattern": ENDLESS}, "layers_pattern"),
    ],
)
def test_an_expression_that_never_ends_is_refused_by_its_field(
    config: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expressions, "CPU_SECONDS", 1)
    with pytest.raises(UnsupportedAdapterError, match=rf"{field} is .*takes more than 1 s of CPU time"):
        require_expressions_that_end(config, MODULES)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"target_modules": r".*\.(q|v)_proj", "rank_pattern": {r"layers\.[0-3]\..*": 8}},
        {"target_modules": "([", "exclude_modules": "(" * 5000},
        {"target_modules": 7, "rank_pattern": None, "alpha_pattern": 7, "modules_to_save": [None, "lm_head"]},
    ],
    ids=["nothing", "honest", "no expression", "other kinds"],
)
def test_expressions_that_end_are_accepted(config: dict[str, Any]) -> None:
    require_expressions_that_end(config, MODULES)


def test_names_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressions, "start_answering", lambda *_: pytest.fail("a process was started"))
    require_expressions_that_end(
        {"target_modules": ["q_proj", "model.layers.0.mlp"], "rank_pattern": {"v_proj": 4}, "exclude_modules": "lm_head"}, MODULES
    )

"""Each threshold of the gates in numbers: what it lets through, what it stops, and which gate holds."""

import dataclasses
import math
from itertools import pairwise
from typing import Any

import pytest

from finetune_trainer.verify.gate import GATES, UNIT_ROUNDOFF, LogitFigures, coarsest_dtype, gate_failures, judged_share
from finetune_trainer.verify.logits import chooses_experts
from tests.support.cases import table

GOOD = LogitFigures(
    num_prompts=4,
    num_positions=100,
    max_abs_difference=0.1,
    usual_abs_difference=0.1,
    max_abs_logit=20.0,
    mean_kl=1e-4,
    effect_mean_kl=0.5,
    top1_agreement=0.99,
)
_NONE = dict.fromkeys(("max_abs_difference", "usual_abs_difference", "mean_kl", "effect_mean_kl"), 0.0)
EQUAL = dataclasses.replace(GOOD, num_positions=1000, max_abs_logit=1.0, top1_agreement=1.0, **_NONE)


def test_figures_within_every_threshold_pass() -> None:
    assert gate_failures(GOOD, GATES["bfloat16"]) == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"usual_abs_difference": 2.0},
            "the largest difference of 90% of positions is 0.1 of the largest logit; the limit is 0.094",
        ),
        ({"mean_kl": 0.02}, "mean KL divergence of 90% of positions is 0.02"),
        ({"top1_agreement": 0.9}, "agrees at 90.00%"),
        ({"mean_kl": 0.004, "effect_mean_kl": 0.006}, "distance from base + adapter is 67% of the base model's; the limit is"),
    ],
)
def test_each_threshold_refuses_alone(change: dict[str, float], words: str) -> None:
    found = gate_failures(dataclasses.replace(GOOD, **change), GATES["bfloat16"])
    assert len(found) == 1
    assert words in found[0]


def test_where_experts_are_chosen_the_median_position_is_judged() -> None:
    """A token near a tie goes to another expert by rounding alone, and its logits change by much."""
    gate = GATES["bfloat16"]
    assert judged_share(chooses_experts=True) == 0.5
    one_elsewhere = dataclasses.replace(GOOD, max_abs_difference=10.0, chooses_experts=True)
    assert gate_failures(one_elsewhere, gate) == ()
    (found,) = gate_failures(dataclasses.replace(one_elsewhere, usual_abs_difference=1.5), gate)
    assert "the largest difference of 50% of positions is 0.075 of the largest logit; the limit is 0.062" in found
    assert gate_failures(dataclasses.replace(GOOD, usual_abs_difference=1.5), gate) == ()


def test_a_single_position_decides_nothing() -> None:
    """One may be ill-conditioned: rounding alone changes its logits by much."""
    gate = GATES["float16"]
    few = dataclasses.replace(GOOD, num_positions=63, max_abs_difference=10.0, top1_agreement=62 / 63)
    assert gate_failures(few, gate) == ()
    assert len(gate_failures(dataclasses.replace(few, top1_agreement=61 / 63), gate)) == 1
    assert len(gate_failures(few, dataclasses.replace(gate, max_excused=0))) == 1
    assert len(gate_failures(few, dataclasses.replace(gate, max_excused=0, min_top1_agreement=2.0))) == 1


@pytest.mark.parametrize(
    ("config", "chooses"),
    [
        ({"num_local_experts": 8}, True),
        ({"text_config": {"n_routed_experts": 64}}, True),
        ({"num_local_experts": 0, "hidden_size": 64}, False),
        ({"hidden_size": 64}, False),
    ],
)
def test_config_json_says_whether_experts_are_chosen(config: dict[str, Any], chooses: bool) -> None:
    assert chooses_experts(config) == chooses


@pytest.mark.parametrize(("dtype", "field", "passes", "fails"), table(__file__, "test_thresholds"))
def test_thresholds(dtype: str, field: str, passes: float, fails: float) -> None:
    assert gate_failures(dataclasses.replace(EQUAL, **{field: passes}), GATES[dtype]) == ()
    assert len(gate_failures(dataclasses.replace(EQUAL, **{field: fails}), GATES[dtype])) == 1


@pytest.mark.parametrize("name", ["usual_abs_difference", "mean_kl", "top1_agreement"])
def test_not_a_number_never_passes(name: str) -> None:
    """Not even if the adapter has no effect that could be measured."""
    for figures in (GOOD, EQUAL):
        assert gate_failures(dataclasses.replace(figures, **{name: math.nan}), GATES["bfloat16"])


def test_an_effect_too_small_to_measure_asks_for_no_share_of_it() -> None:
    figures = dataclasses.replace(GOOD, mean_kl=1e-5, effect_mean_kl=2e-5)
    assert gate_failures(figures, GATES["bfloat16"]) == ()


def test_finer_dtypes_have_stricter_gates_and_the_coarsest_decides() -> None:
    ordered = sorted(GATES, key=UNIT_ROUNDOFF.__getitem__)
    assert ordered == ["float32", "float16", "bfloat16"]
    for finer, coarser in pairwise(ordered):
        assert GATES[finer].max_mean_kl < GATES[coarser].max_mean_kl
        assert GATES[finer].max_relative_difference < GATES[coarser].max_relative_difference
        assert GATES[finer].min_top1_agreement > GATES[coarser].min_top1_agreement
        assert (
            coarsest_dtype(finer, coarser) == coarsest_dtype(coarser, finer) == coarsest_dtype(finer, coarser, finer) == coarser
        )


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="float8"):
        coarsest_dtype("float8", "bfloat16")

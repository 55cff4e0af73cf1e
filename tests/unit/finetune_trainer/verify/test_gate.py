import dataclasses
import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from finetune_trainer.verify.gate import GATES, UNIT_ROUNDOFF, LogitFigures, coarsest_dtype, gate_failures, judged_share
from finetune_trainer.verify.logits import _kl, chooses_experts, mean_of_least

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


def test_figures_within_every_threshold_pass() -> None:
    assert gate_failures(GOOD, GATES["bfloat16"]) == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"usual_abs_difference": 2.0},
            "the largest difference of 90% of positions is 0.1 of the largest logit, and allowed is 0.094",
        ),
        ({"mean_kl": 0.02}, "mean KL divergence of 90% of positions is 0.02"),
        ({"top1_agreement": 0.9}, "agrees at 90.00%"),
        ({"mean_kl": 0.004, "effect_mean_kl": 0.006}, "67% as far"),
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
    assert "the largest difference of 50% of positions is 0.075 of the largest logit, and allowed is 0.062" in found
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


@pytest.mark.parametrize("name", ["usual_abs_difference", "mean_kl", "top1_agreement"])
def test_not_a_number_never_passes(name: str) -> None:
    assert gate_failures(dataclasses.replace(GOOD, **{name: math.nan}), GATES["bfloat16"])


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


def test_a_divergence_is_the_mean_of_the_positions_that_diverge_least() -> None:
    """Of 42 positions one ill-conditioned one had a divergence that made the mean of all eight times what is allowed."""
    values = torch.full((42,), 1e-6, dtype=torch.float64)
    values[7] = 0.034
    assert values.mean() > 8 * GATES["float16"].max_mean_kl
    assert mean_of_least(values, 0.9) == pytest.approx(1e-6)
    assert mean_of_least(torch.tensor([3.0, 1.0, 2.0]), 0.5) == 1.5
    assert mean_of_least(torch.tensor([3.0]), 0.5) == 3.0
    assert math.isnan(mean_of_least(torch.tensor([1.0] * 99 + [math.nan]), 0.5))


def test_a_divergence_is_that_of_the_distributions_whatever_is_added_to_their_logits() -> None:
    reference = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]).log() + 7
    other = torch.tensor([[0.25, 0.75, 0.0], [0.2, 0.3, 0.5]]).log() - 3
    divergence, itself = _kl(reference, other, reference)
    # 0.5 ln 2 + 0.5 ln (2 / 3); the third token is ruled out in both.
    assert divergence.tolist() == pytest.approx([0.14384103622589045, 0.0], abs=1e-7)
    assert itself.tolist() == pytest.approx([0.0, 0.0], abs=1e-15)

"""Thresholds of the gates in numbers: 24 units of rounding in 16 bits, and what each lets through and stops."""

from __future__ import annotations

import dataclasses
import math

import pytest

from finetune_trainer.verify.gate import GATES, LogitFigures, gate_failures

RIGHT = LogitFigures(
    num_prompts=4,
    num_positions=1000,
    max_abs_difference=0.0,
    usual_abs_difference=0.0,
    max_abs_logit=1.0,
    mean_kl=0.0,
    effect_mean_kl=0.0,
    top1_agreement=1.0,
)


@pytest.mark.parametrize(
    ("dtype", "field", "passes", "fails"),
    [
        # 24 / 256, 24 / 2048, and 1e-4 where the order of sums is what remains.
        ("bfloat16", "usual_abs_difference", 0.09375, 0.0938),
        ("float16", "usual_abs_difference", 0.01171875, 0.01172),
        ("float32", "usual_abs_difference", 1e-4, 1.01e-4),
        ("bfloat16", "mean_kl", 5e-3, 5.01e-3),
        ("float16", "mean_kl", 1e-4, 1.01e-4),
        ("float32", "mean_kl", 1e-7, 1.01e-7),
        ("bfloat16", "top1_agreement", 0.97, 0.969),
        ("float16", "top1_agreement", 0.99, 0.989),
        # One of 1,000 positions is excused, two are not.
        ("float32", "top1_agreement", 0.999, 0.998),
    ],
)
def test_thresholds(dtype: str, field: str, passes: float, fails: float) -> None:
    assert gate_failures(dataclasses.replace(RIGHT, **{field: passes}), GATES[dtype]) == ()
    assert len(gate_failures(dataclasses.replace(RIGHT, **{field: fails}), GATES[dtype])) == 1


@pytest.mark.parametrize("field", ["usual_abs_difference", "mean_kl", "top1_agreement"])
def test_what_is_not_a_number_fails_by_itself(field: str) -> None:
    """Also where the adapter has no effect that would be measured."""
    assert len(gate_failures(dataclasses.replace(RIGHT, **{field: math.nan}), GATES["bfloat16"])) == 1

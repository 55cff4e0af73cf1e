"""Schedules and the loss scale in numbers that were computed by hand from the formulas of their sources."""

import math

import pytest

from finetune_trainer.checkpoint.manifest import LossScale
from finetune_trainer.data.steps import total_steps
from finetune_trainer.train.policy import FIRST_LOSS_SCALE as FIRST
from finetune_trainer.train.policy import halved_loss_scale, learning_rate, least_row_length, next_loss_scale, warmup_steps
from tests.support.cases import table
from tests.support.tiny_model import plan_of, tiny_spec

PEAK = 0.01


def training(scheduler: str, warmup: str = "0", **more: object):
    written = {"scheduler": scheduler, "warmupRatio": warmup, "learningRate": "0.01", **more}
    return plan_of(tiny_spec(training=written)).training


def rates(total: int, scheduler: str, warmup: str = "0", **more: object) -> list[float]:
    return [round(learning_rate(step, total, training(scheduler, warmup, **more)) / PEAK, 6) for step in range(total)]


@pytest.mark.parametrize(("scheduler", "warmup", "more", "expected"), table(__file__, "test_rates_of_four_steps"))
def test_rates_of_four_steps(scheduler, warmup, more, expected):
    assert rates(4, scheduler, warmup, **more) == expected


def test_the_decay_is_a_share_of_all_steps_and_not_of_those_after_the_warm_up():
    # Two of ten steps warm up, five fall: (5 - 1) / 5 and so on.
    expected = [0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]
    assert rates(10, "WarmupStableDecay", "0.2", decayRatio="0.5") == expected


def test_a_warm_up_beyond_the_run_leaves_one_step():
    assert rates(4, "Linear", "0.99") == [0.333333, 0.666667, 1, 1]


@pytest.mark.parametrize(
    ("total", "ratio", "steps"),
    [(50, 0.14, 7), (100, 0.03, 3), (10, 0.03, 1), (10, 0.31, 4), (1, 0.5, 0), (4, 1.0, 3), (4, 0, 0)],
)
def test_steps_of_a_warm_up(total, ratio, steps):
    assert warmup_steps(total, ratio) == steps


@pytest.mark.parametrize(("epochs", "most", "steps"), [(1, None, 3), (2, None, 5), (4, None, 10), (None, 7, 7), (3, 2, 2)])
def test_steps_of_a_run_of_ten_sequences_in_batches_of_four(epochs, most, steps):
    assert total_steps(epochs, most, 10, 4) == steps


def test_the_loss_scale_is_that_of_torch():
    assert (FIRST.factor, FIRST.steps) == (65536.0, 0)
    assert [halved_loss_scale(factor) for factor in (4.0, 2.0, 1.0, 0.5)] == [2.0, 1.0, None, None]
    assert next_loss_scale(LossScale(factor=8.0, steps=5), 8.0) == LossScale(factor=8.0, steps=6)
    assert next_loss_scale(LossScale(factor=8.0, steps=1998), 8.0) == LossScale(factor=8.0, steps=1999)
    assert next_loss_scale(LossScale(factor=8.0, steps=1999), 8.0) == LossScale(factor=16.0, steps=0)
    assert next_loss_scale(LossScale(factor=8.0, steps=1999), 4.0) == LossScale(factor=4.0, steps=0)
    assert next_loss_scale(LossScale(factor=2.0**24, steps=1999), 2.0**24) == LossScale(factor=2.0**24, steps=0)
    assert math.log2(FIRST.factor) == 16


@pytest.mark.parametrize(
    ("compiles", "packs", "expected"), [(True, True, 48), (True, False, 1), (False, True, 1), (False, False, 1)]
)
def test_rows_of_compiled_layers_have_one_length_if_they_are_packed(compiles: bool, packs: bool, expected: int):
    plan = plan_of(tiny_spec(data={"maxSequenceLength": 48, "packing": packs}, training={"compile": compiles}))
    assert least_row_length(plan) == expected

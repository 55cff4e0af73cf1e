"""The learning rate against its bounds and against transformers' schedules; test_policy_literals.py has numbers by hand."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from finetune_job.api.training import Scheduler
from finetune_job.plan.run_plan import TrainingPlan
from finetune_trainer.train.policy import learning_rate, warmup_steps
from tests.support.cases import table
from tests.support.tiny_model import plan_of, tiny_spec

PLAIN = plan_of(tiny_spec()).training


def training(**changes: Any) -> TrainingPlan:
    return PLAIN.model_copy(update={"learning_rate": 1.0, "warmup_ratio": 0.0, "min_learning_rate_ratio": 0.0, **changes})


def rates(total: int, plan: TrainingPlan) -> list[float]:
    return [learning_rate(step, total, plan) for step in range(total)]


PLANS = st.builds(
    training,
    scheduler=st.sampled_from(list(Scheduler)),
    warmup_ratio=st.floats(0, 0.999),
    min_learning_rate_ratio=st.floats(0, 1),
    decay_ratio=st.floats(0, 1),
    learning_rate=st.floats(1e-7, 10),
)


@given(st.integers(1, 10_000), PLANS, st.data())
def test_rate_stays_within_its_bounds_and_makes_no_jumps(total: int, plan: TrainingPlan, data: st.DataObject) -> None:
    warmup = warmup_steps(total, plan.warmup_ratio)
    assert warmup < total
    step = data.draw(st.integers(0, total - 1))
    rate, peak = learning_rate(step, total, plan), plan.learning_rate
    assert 0 < rate <= peak
    assert learning_rate(0, total, plan) > 0
    if step >= warmup:
        assert rate >= plan.min_learning_rate_ratio * peak
    following = learning_rate(min(step + 1, total - 1), total, plan)
    if step < warmup:
        assert following - rate <= peak / warmup * 1.000001
    else:
        decay = min(math.ceil(total * plan.decay_ratio - 1e-9), total - warmup) or total
        steepest = max(math.pi / 2 / (total - warmup), 1 / decay, 1 / (2 * (warmup or 10_000)))
        assert 0 <= rate - following <= peak * steepest * 1.000001 + 1e-15


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize(("scheduler", "theirs", "least", "settings"), table(__file__, "test_rates_are_those_of_transformers"))
def test_rates_are_those_of_transformers(
    warmup: int, scheduler: str, theirs: str, least: float, settings: dict[str, Any]
) -> None:
    """After the warm-up the same; in it one step ahead, because theirs begins with a rate of 0."""
    total = 50
    plan = training(scheduler=Scheduler(scheduler), warmup_ratio=warmup / total, min_learning_rate_ratio=least, decay_ratio=0.2)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = get_scheduler(
        theirs, optimizer, num_warmup_steps=warmup, num_training_steps=total, scheduler_specific_kwargs=settings
    )
    expected = []
    for _ in range(total):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    found = rates(total, plan)
    assert found[warmup:] == pytest.approx(expected[warmup:], abs=1e-12)
    if theirs != "warmup_stable_decay":
        # There the warm-up rises from the least rate, not from 0.
        assert found[: max(warmup - 1, 0)] == pytest.approx(expected[1:warmup], abs=1e-12)

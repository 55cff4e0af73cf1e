"""Schedule, batches and seeds: pure functions of the step."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_job.api.training import Scheduler
from finetune_trainer.train.batches import global_batch, micro_batch
from finetune_trainer.train.history import kept_lines
from finetune_trainer.train.randomness import seed_of
from finetune_trainer.train.schedule import learning_rate, total_steps, warmup_steps


def test_constant_rate_after_warmup() -> None:
    rates = [learning_rate(step, 10, 2.0, Scheduler.CONSTANT, 0.4) for step in range(10)]
    assert rates == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]


def test_linear_rate_falls_evenly() -> None:
    assert [learning_rate(step, 4, 1.0, Scheduler.LINEAR, 0.0) for step in range(4)] == [1.0, 0.75, 0.5, 0.25]


def test_cosine_rate_is_half_in_the_middle() -> None:
    rates = [learning_rate(step, 8, 1.0, Scheduler.COSINE, 0.0) for step in range(8)]
    assert rates[0] == 1.0
    assert rates[4] == pytest.approx(0.5)
    assert rates[7] == pytest.approx((1 + math.cos(math.pi * 7 / 8)) / 2)


@given(st.integers(1, 10_000), st.floats(0, 0.999), st.sampled_from(list(Scheduler)), st.data())
def test_rate_is_positive_and_never_above_its_peak(total: int, ratio: float, scheduler: Scheduler, data: st.DataObject) -> None:
    step = data.draw(st.integers(0, total - 1))
    assert warmup_steps(total, ratio) < total
    assert 0 < learning_rate(step, total, 3.0, scheduler, ratio) <= 3.0


def test_total_steps_covers_every_epoch() -> None:
    assert total_steps(None, 7, 100, 16) == 7
    assert total_steps(2, None, 10, 4) == 5
    assert total_steps(1, None, 10, 4) == 3
    assert total_steps(1, None, 1, 64) == 1


@given(st.integers(1, 40), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_steps_walk_through_each_epoch_once(n: int, global_batch_size: int, seed: int) -> None:
    steps = [global_batch(step, global_batch_size, seed, n) for step in range(2 * n)]
    order = [sequence for step in steps for sequence in step]
    assert sorted(order[:n]) == sorted(order[n : 2 * n]) == list(range(n))


@pytest.mark.parametrize(("world_size", "micro_size"), [(1, 8), (1, 2), (2, 1), (4, 2), (8, 1)])
def test_ranks_and_micro_steps_share_a_global_batch(world_size: int, micro_size: int) -> None:
    sequences = list(range(100, 108))
    steps = 8 // (world_size * micro_size)
    parts = [micro_batch(sequences, m, rank, world_size, micro_size) for m in range(steps) for rank in range(world_size)]
    assert [sequence for part in parts for sequence in part] == sequences


def test_seeds_differ_by_each_argument() -> None:
    places = [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 0, 0), (0, 11, 0, 0), (0, 1, 1, 0)]
    seeds = {seed_of(*place) for place in places}
    assert len(seeds) == 7
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_history_keeps_lines_up_to_the_resumed_step() -> None:
    text = '{"step": 0}\n{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste'
    assert kept_lines(text, 2) == ['{"step": 0}', '{"step": 1}', '{"step": 2}']
    assert kept_lines(text, 0) == ['{"step": 0}']

"""Batches and seeds: pure functions of the step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_trainer.train.batches import global_batch, micro_batch
from finetune_trainer.train.step import seed_of


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

"""Batches are there before they are asked for, each built once."""

import pytest

from finetune_trainer.train.batches import Prefetch

ORDER = [(step, micro_step) for step in range(3, 6) for micro_step in range(2)]


def test_batches_asked_for_in_order_are_built_once_and_one_ahead() -> None:
    built: list[tuple[int, int]] = []

    def build(step: int, micro_step: int) -> tuple[int, int]:
        built.append((step, micro_step))
        return step, micro_step

    prefetch = Prefetch(build, 2)
    assert [prefetch.take(*place)[0] for place in [*ORDER, (6, 0)]] == [*ORDER, (6, 0)]
    assert built[: len(ORDER) + 1] == [*ORDER, (6, 0)]


def test_any_other_order_gives_the_batch_that_is_asked_for() -> None:
    prefetch = Prefetch(lambda step, micro_step: (step, micro_step), 2)
    assert [prefetch.take(*place)[0] for place in reversed(ORDER)] == ORDER[::-1]


def test_what_building_raised_is_raised_where_it_is_asked_for() -> None:
    def build(step: int, _micro_step: int) -> int:
        if step == 1:
            raise IndexError("no such sequence")
        return step

    prefetch = Prefetch(build, 1)
    assert prefetch.take(0, 0)[0] == 0
    with pytest.raises(IndexError, match="no such sequence"):
        prefetch.take(1, 0)

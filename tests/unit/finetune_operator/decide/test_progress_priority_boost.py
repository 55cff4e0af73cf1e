"""What a run would lose by a preemption, in quarters of the profile's boost; expectations by hand."""

import math
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from finetune_job.plan.launch_plan import CheckpointInterval
from finetune_job.progress import Progress
from finetune_operator.decide.progress import priority_boost

HUNDRED_STEPS = CheckpointInterval(every_steps=100)
SECONDS = CheckpointInterval(every_steps=100, every_seconds=600)
COUNTS = st.integers(0, 2**53)
NUMBERS = st.none() | st.floats()


def at(step: int, checkpoint: int | None = None, pace: float | None = None) -> Progress:
    return Progress(attempt=0, step=step, total_steps=1000, checkpoint_step=checkpoint, step_seconds_median=pace)


@pytest.mark.parametrize(
    ("step", "boost"),
    [
        (300, 0),
        (312, 0),
        (313, 10),
        (325, 10),
        (337, 10),
        (338, 20),
        (350, 20),
        (363, 30),
        (375, 30),
        (387, 30),
        (388, 40),
        (399, 40),
    ],
)
def test_the_boost_rises_by_quarters_from_one_checkpoint_to_the_next(step: int, boost: int) -> None:
    assert priority_boost(40, at(step, checkpoint=300), HUNDRED_STEPS) == boost


def test_an_interval_costs_five_writes() -> None:
    boosts = [priority_boost(40, at(step, checkpoint=step - step % 100), HUNDRED_STEPS) for step in range(100, 301)]
    changes = [later for earlier, later in pairwise(boosts) if earlier != later]
    assert changes == [10, 20, 30, 40, 0] * 2


@pytest.mark.parametrize(
    ("progress", "boost"),
    [
        (at(0), 0),
        (at(50), 20),
        (at(100), 40),
        (at(130, checkpoint=0), 40),
        (at(205, checkpoint=100), 40),
        (at(205, checkpoint=200), 0),
        (at(90, checkpoint=100), 0),
    ],
    ids=[
        "the beginning",
        "on the way to the first checkpoint",
        "the first is being written",
        "the first failed",
        "one is late",
        "and is complete now",
        "a step before its checkpoint",
    ],
)
def test_the_loss_is_counted_from_the_latest_complete_checkpoint(progress: Progress, boost: int) -> None:
    assert priority_boost(40, progress, HUNDRED_STEPS) == boost


@pytest.mark.parametrize(
    ("step", "pace", "boost"),
    [
        (10, 30.0, 20),
        (20, 30.0, 40),
        (50, 3.0, 20),
        (10, None, 0),
        (10, math.nan, 0),
        (10, math.inf, 0),
        (10, -30.0, 0),
        (10, 0.0, 0),
    ],
)
def test_a_checkpoint_by_the_clock_is_expected_by_the_pace_of_the_steps(step: int, pace: float | None, boost: int) -> None:
    assert priority_boost(40, at(step, pace=pace), SECONDS) == boost


def test_a_boost_that_has_no_quarters_is_rounded_down() -> None:
    boosts = [priority_boost(3, at(step), HUNDRED_STEPS) for step in (0, 25, 50, 75, 100)]
    assert boosts == [0, 0, 1, 2, 3]


def test_without_an_interval_nothing_is_known_to_be_lost() -> None:
    assert priority_boost(40, at(50), CheckpointInterval(every_steps=0)) == 0


@given(
    most=st.integers(0, 1_000_000),
    step=COUNTS,
    checkpoint=st.none() | COUNTS,
    pace=NUMBERS,
    seconds=st.none() | COUNTS,
    every=COUNTS,
)
@example(most=40, step=2**53, checkpoint=None, pace=1.7e308, seconds=1, every=1)
@example(most=40, step=0, checkpoint=None, pace=math.inf, seconds=1, every=1)
def test_whatever_a_container_says_the_boost_is_a_number_of_quarters(
    most: int, step: int, checkpoint: int | None, pace: float | None, seconds: int | None, every: int
) -> None:
    boost = priority_boost(most, at(step, checkpoint, pace), CheckpointInterval(every_steps=every, every_seconds=seconds))
    assert boost in {most * quarters // 4 for quarters in range(5)}


@given(
    checkpoint=st.integers(0, 10_000),
    steps=st.lists(st.integers(0, 500), min_size=2, max_size=2).map(sorted),
    pace=NUMBERS,
    every=st.integers(1, 300),
)
def test_between_two_checkpoints_the_boost_never_falls(checkpoint: int, steps: list[int], pace: float | None, every: int) -> None:
    interval = CheckpointInterval(every_steps=every, every_seconds=60)
    before, after = (priority_boost(1000, at(checkpoint + step, checkpoint, pace), interval) for step in steps)
    assert before <= after
    assert priority_boost(1000, at(checkpoint, checkpoint, pace), interval) == 0
    assert priority_boost(1000, at(checkpoint + every, checkpoint, pace), interval) == 1000

"""Pace of the latest steps."""

from finetune_trainer.observe.steps import PaceWindow, StepTiming, straggler_ratio


def test_the_window_forgets_old_steps() -> None:
    window = PaceWindow(size=3)
    window.add(StepTiming(seconds=100.0, data_seconds=50.0, tokens=1, flops=1.0))
    for seconds in (1.0, 2.0):
        window.add(StepTiming(seconds=seconds, data_seconds=0.25, tokens=30, flops=6.0))
    found = window.add(StepTiming(seconds=3.0, data_seconds=1.0, tokens=60, flops=6.0))
    assert found.tokens_per_second == 20
    assert found.flops_per_second == 3
    assert (found.seconds_mean, found.seconds_median, found.seconds_p95) == (2, 2, 3)
    assert found.data_wait_ratio == 0.25


def test_operations_are_unknown_where_those_of_a_step_are() -> None:
    window = PaceWindow()
    window.add(StepTiming(1.0, 0.0, 1, None))
    assert window.add(StepTiming(1.0, 0.0, 1, 5.0)).flops_per_second is None


def test_the_95th_percentile_is_a_value_that_occurred() -> None:
    window = PaceWindow()
    paces = [window.add(StepTiming(float(seconds), 0.0, 1, None)) for seconds in range(100, 0, -1)]
    assert (paces[0].seconds_p95, paces[-1].seconds_p95) == (100, 95)


def test_the_slowest_rank_is_compared_with_the_median_rank() -> None:
    assert straggler_ratio([1.0, 1.0, 1.0, 3.0]) == 3
    assert straggler_ratio([1.0]) == 1
    assert straggler_ratio([]) is None
    assert straggler_ratio([0.0, 0.0]) is None

"""Pauses between tries: they double, follow the server, and end early."""

import signal
import threading

import pytest

from finetune_trainer.fetch.source import source_unavailable
from finetune_trainer.network.retry import Retries, RetryPolicy, StoppedError, TransientError, pause_seconds


def test_pauses_double_up_to_a_limit_and_follow_the_server():
    patience = RetryPolicy(attempts=8, first_seconds=1, longest_seconds=10)
    assert [pause_seconds(patience, failures, None, 1.0) for failures in range(1, 9)] == [1, 2, 4, 8, 10, 10, 10, None]
    assert pause_seconds(patience, 3, None, 0.0) == 2
    assert pause_seconds(patience, 1, 30.0, 0.5) == 30
    assert pause_seconds(patience, 1, patience.longest_retry_after_seconds + 1, 0.5) is None


def test_a_pause_ends_when_another_file_has_failed():
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        Retries("x", RetryPolicy(first_seconds=1000), stop, source_unavailable).failed(TransientError("y"))


class EventWithLock(threading.Event):
    """An event in whose `wait` a signal would come at the worst moment."""

    def wait(self, timeout: float | None = None) -> bool:
        raise AssertionError("a handler of a signal that sets the event now waits forever")


def test_a_signal_ends_a_pause_at_any_moment():
    stop = EventWithLock()
    before = signal.signal(signal.SIGALRM, lambda _number, _frame: stop.set())
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(StoppedError):
            Retries("x", RetryPolicy(first_seconds=1000), stop, source_unavailable).failed(TransientError("y"))
    finally:
        signal.signal(signal.SIGALRM, before)

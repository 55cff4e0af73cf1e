"""Threads meet at every unit: each is loaded once for all that need it, and one that fails takes the others down."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from finetune_trainer.verify.cooperative_threads import CooperativeThreads


class Record:
    """Threads over units that are letters."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.threads: CooperativeThreads[str] = CooperativeThreads(
            lambda unit: self.events.append(f"+{unit}"), lambda unit: self.events.append(f"-{unit}")
        )

    def thread(self, number: int, units: str) -> None:
        for unit in units:
            self.threads.enter(unit)
            self.events.append(f"{number}{unit}")

    def run(self, *paths: str) -> str:
        functions = [partial(self.thread, number, units) for number, units in enumerate(paths)]
        self.threads.run([functions])
        return " ".join(self.events)


def test_each_unit_is_loaded_once_for_all_and_released_before_the_next() -> None:
    assert Record().run("ab", "ab", "ab") == "+a 0a 1a 2a -a +b 0b 1b 2b -b"


def test_a_unit_that_is_entered_twice_in_a_row_stays() -> None:
    assert Record().run("aab", "aab") == "+a 0a 1a 0a 1a -a +b 0b 1b -b"


def test_threads_that_leave_units_out_still_end_and_wait_for_those_behind() -> None:
    events = Record().run("abc", "ac", "abc")
    assert events.count("+c") == 1 or events.index("1c") < events.index("0c")
    assert sorted(event for event in events.split() if event[0].isdigit()) == ["0a", "0b", "0c", "1a", "1c", "2a", "2b", "2c"]


def test_groups_run_beside_each_other_and_functions_of_a_group_do_not() -> None:
    both_are_there, computing, most = threading.Barrier(2), [0, 0], [0, 0]
    threads: CooperativeThreads[str] = CooperativeThreads(lambda _: None, lambda _: None)

    def compute(group: int, *, meets: bool) -> None:
        threads.enter("a")
        computing[group] += 1
        most[group] = max(most[group], computing[group])
        if meets:
            both_are_there.wait(timeout=10)  # BrokenBarrierError if the other group waited for this one
        time.sleep(0.02)
        computing[group] -= 1

    threads.run([[partial(compute, group, meets=meets) for meets in (True, False, False)] for group in (0, 1)])
    assert most == [1, 1]


def test_no_unit_is_loaded_or_released_while_another_group_computes() -> None:
    computing, seen = [0], []
    threads: CooperativeThreads[str] = CooperativeThreads(
        lambda _: seen.append(computing[0]), lambda _: seen.append(computing[0])
    )

    def compute(seconds: float) -> None:
        for unit in "abc":
            threads.enter(unit)
            computing[0] += 1
            time.sleep(seconds)
            computing[0] -= 1

    threads.run([[partial(compute, 0.0)], [partial(compute, 0.02)]])
    assert seen == [0] * 6


def test_threads_without_units_and_no_threads_at_all() -> None:
    assert Record().run() == ""
    assert Record().run("", "a") == "+a 1a -a"


def test_an_error_in_one_thread_is_raised_and_ends_all_of_them() -> None:
    record = Record()
    unwound = []
    before = threading.active_count()

    def fails() -> None:
        record.threads.enter("a")
        raise ValueError("of this thread")

    def waits() -> None:
        try:
            record.threads.enter("b")
        finally:
            unwound.append(True)

    with pytest.raises(ValueError, match="of this thread"):
        record.threads.run([[fails, waits], [waits]])
    assert unwound == [True, True]
    assert threading.active_count() == before
    assert record.events == ["+a", "-a"]


def test_an_error_while_a_unit_is_loaded_ends_all_threads() -> None:
    before = threading.active_count()

    def load(_: str) -> None:
        raise OSError("no such file")

    threads: CooperativeThreads[str] = CooperativeThreads(load, lambda _: None)
    with pytest.raises(OSError, match="no such file"):
        threads.run([[lambda: threads.enter("a")] * 3])
    assert threading.active_count() == before

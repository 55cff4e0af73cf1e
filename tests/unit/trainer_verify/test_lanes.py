"""Lanes meet at every part: each is loaded once for all that need it, and one that fails takes the others down."""

from __future__ import annotations

import threading

import pytest

from finetune_trainer.verify.lanes import Lanes


class Record:
    """Lanes over parts that are letters."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.lanes: Lanes[str] = Lanes(lambda part: self.events.append(f"+{part}"), lambda part: self.events.append(f"-{part}"))

    def lane(self, number: int, parts: str) -> None:
        for part in parts:
            self.lanes.enter(part)
            self.events.append(f"{number}{part}")

    def run(self, *paths: str) -> str:
        self.lanes.run([lambda number=number, parts=parts: self.lane(number, parts) for number, parts in enumerate(paths)])  # type: ignore[misc]
        return " ".join(self.events)


def test_each_part_is_loaded_once_for_all_and_released_before_the_next() -> None:
    assert Record().run("ab", "ab", "ab") == "+a 0a 1a 2a -a +b 0b 1b 2b -b"


def test_a_part_that_is_entered_twice_in_a_row_stays() -> None:
    assert Record().run("aab", "aab") == "+a 0a 1a 0a 1a -a +b 0b 1b -b"


def test_lanes_that_leave_parts_out_still_end_and_wait_for_those_behind() -> None:
    events = Record().run("abc", "ac", "abc")
    assert events.count("+c") == 1 or events.index("1c") < events.index("0c")
    assert sorted(event for event in events.split() if event[0].isdigit()) == ["0a", "0b", "0c", "1a", "1c", "2a", "2b", "2c"]


def test_lanes_without_parts_and_no_lanes_at_all() -> None:
    assert Record().run() == ""
    assert Record().run("", "a") == "+a 1a -a"


def test_an_error_in_one_lane_is_raised_and_ends_all_of_them() -> None:
    record = Record()
    unwound = []
    before = threading.active_count()

    def fails() -> None:
        record.lanes.enter("a")
        raise ValueError("of this lane")

    def waits() -> None:
        try:
            record.lanes.enter("b")
        finally:
            unwound.append(True)

    with pytest.raises(ValueError, match="of this lane"):
        record.lanes.run([fails, waits, waits])
    assert unwound == [True, True]
    assert threading.active_count() == before
    assert record.events == ["+a", "-a"]


def test_an_error_while_a_part_is_loaded_ends_all_lanes() -> None:
    before = threading.active_count()

    def load(_: str) -> None:
        raise OSError("no such file")

    lanes: Lanes[str] = Lanes(load, lambda _: None)
    with pytest.raises(OSError, match="no such file"):
        lanes.run([lambda: lanes.enter("a")] * 3)
    assert threading.active_count() == before

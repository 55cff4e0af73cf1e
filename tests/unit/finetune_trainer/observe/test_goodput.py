"""Where the time went: over attempts that end, die and lose steps, every second has exactly one cause."""

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_trainer.json_lines import read_lines
from finetune_trainer.observe.goodput import (
    Activity,
    AttemptLosses,
    AttemptStarted,
    Cause,
    GoodputRecord,
    GoodputTotals,
    TimeSpent,
    attempt_losses,
    goodput_totals,
    parse_records,
)
from finetune_trainer.observe.run_files import LONGEST_GAP_SECONDS, GoodputRecorder, Stopwatch, process_age_seconds


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def spent(attempt: int, start: float, step: int, **seconds: float) -> TimeSpent:
    values = {Activity(name): value for name, value in seconds.items()}
    return TimeSpent(attempt=attempt, time=start + sum(values.values()), step=step, seconds=values)


def test_steps_done_again_after_a_kill_are_lost() -> None:
    """Attempt 0 saves at step 10, continues to 14, is killed; attempt 1 starts at 10 and finishes."""
    found = goodput_totals(
        [
            AttemptStarted(attempt=0, time=100, step=0),
            spent(0, 100, 10, startup=20, steps=50, data_wait=5),
            spent(0, 100, 14, startup=20, steps=70, data_wait=6, checkpoint=2),
            AttemptStarted(attempt=1, time=230, step=10),
            spent(1, 230, 20, startup=10, steps=50, evaluation=3, export=4, other=1),
        ]
    )
    assert found.productive_seconds == 100
    assert {cause: seconds for cause, seconds in found.badput_seconds.items() if seconds} == {
        Cause.STARTUP: 30,
        Cause.LOST_STEPS: 20,
        Cause.CHECKPOINT: 2,
        Cause.EVALUATION: 3,
        Cause.DATA_WAIT: 6,
        Cause.BETWEEN_ATTEMPTS: 230 - 198,
        Cause.EXPORT: 4,
        Cause.OTHER: 1,
    }
    assert found.total_seconds == 230 + 68 - 100
    assert found.goodput == pytest.approx(100 / 198)


def test_a_damaged_checkpoint_loses_steps_of_several_attempts() -> None:
    found = goodput_totals(
        [
            AttemptStarted(attempt=0, time=0, step=0),
            spent(0, 0, 10, steps=10),
            AttemptStarted(attempt=1, time=10, step=10),
            spent(1, 10, 20, steps=10),
            AttemptStarted(attempt=2, time=20, step=5),
            spent(2, 20, 6, steps=1),
        ]
    )
    assert found.badput_seconds[Cause.LOST_STEPS] == 15
    assert found.productive_seconds == 6


def test_clocks_that_disagree_take_no_time_away() -> None:
    found = goodput_totals(
        [AttemptStarted(attempt=0, time=100, step=0), spent(0, 100, 1, steps=10), AttemptStarted(attempt=1, time=90, step=1)]
    )
    assert found.badput_seconds[Cause.BETWEEN_ATTEMPTS] == 0
    assert found.total_seconds == 10


def test_no_time_has_no_goodput() -> None:
    assert goodput_totals([]).goodput is None
    assert goodput_totals([AttemptStarted(attempt=0, time=5, step=0)]).goodput is None
    assert GoodputTotals().plus({Activity.STEPS: 3.0, Activity.DATA_WAIT: 1.0}).goodput == 0.75


@st.composite
def histories(draw: st.DrawFn) -> list[GoodputRecord]:
    """Attempts one after the other: each starts at a step that an earlier record reached or below."""
    records: list[GoodputRecord] = []
    time, reached = 1e6, 0
    durations = st.floats(0, 1000)
    for attempt in range(draw(st.integers(1, 5))):
        time += draw(durations)
        step = draw(st.integers(0, reached))
        records.append(AttemptStarted(attempt=attempt, time=time, step=step))
        seconds = dict.fromkeys(Activity, 0.0)
        start = time
        for _ in range(draw(st.integers(0, 4))):
            for activity in draw(st.lists(st.sampled_from(list(Activity)), max_size=4)):
                seconds[activity] += draw(durations)
            step += draw(st.integers(0, 10))
            records.append(TimeSpent(attempt=attempt, time=start + sum(seconds.values()), step=step, seconds=dict(seconds)))
        time, reached = records[-1].time, max(reached, step)
    return records


@given(histories())
def test_all_parts_add_up_to_the_time_since_the_first_attempt_began(records: list[GoodputRecord]) -> None:
    found = goodput_totals(records)
    assert found.total_seconds == pytest.approx(records[-1].time - records[0].time, abs=1e-6)
    assert found.productive_seconds >= -1e-6
    assert all(seconds >= -1e-6 for seconds in found.badput_seconds.values())
    assert set(found.badput_seconds) == set(Cause)


def test_the_stopwatch_gives_each_second_to_one_activity() -> None:
    clock = Clock()
    watch = Stopwatch(12.0, clock)
    clock.now += 3
    with watch.during(Activity.EVALUATION):
        clock.now += 5
    clock.now += 1
    with watch.during(Activity.STEPS):
        clock.now += 10
    watch.move(2.5, Activity.STEPS, Activity.DATA_WAIT)
    clock.now += 0.5
    with suppress(OSError), watch.during(Activity.CHECKPOINT):
        clock.now += 4
        raise OSError("full")
    assert watch.seconds() == {
        Activity.STARTUP: 16,
        Activity.EVALUATION: 5,
        Activity.STEPS: 7.5,
        Activity.DATA_WAIT: 2.5,
        Activity.OTHER: 0.5,
        Activity.CHECKPOINT: 4,
    }
    watch.move(100, Activity.STEPS, Activity.DATA_WAIT)
    assert sum(watch.seconds().values()) == clock.now - 1000 + 12


def ended(record: TimeSpent, num_saves: int = 0) -> TimeSpent:
    return record.model_copy(update={"is_last": True, "num_saves": num_saves})


def test_an_attempt_is_a_loss_unless_it_saved_before_it_ended() -> None:
    """0 is killed, 1 stops on request after a save, 2 fails behind its save, 3 dies before its first record; 4 runs."""
    found = attempt_losses(
        [
            AttemptStarted(attempt=0, time=0, step=0),
            spent(0, 0, 10, startup=20, steps=50).model_copy(update={"num_saves": 2}),
            AttemptStarted(attempt=1, time=100, step=10),
            ended(spent(1, 100, 14, steps=30, checkpoint=6), num_saves=1),
            AttemptStarted(attempt=2, time=200, step=14),
            ended(spent(2, 200, 20, steps=40, checkpoint=3), num_saves=2),
            AttemptStarted(attempt=3, time=300, step=18),
            AttemptStarted(attempt=4, time=400, step=18),
        ]
    )
    assert found == AttemptLosses(count=3, seconds=70 + 36 + 43, save_seconds=9, num_saves=5)
    assert found.plus({Activity.STEPS: 5.0, Activity.CHECKPOINT: 1.0}, 1) == AttemptLosses(3, 155, 10, 6)
    assert attempt_losses([]) == attempt_losses([AttemptStarted(attempt=0, time=0, step=0)]) == AttemptLosses()


def test_the_records_of_an_attempt_tell_whether_it_was_killed(tmp_path: Path) -> None:
    path, clock = tmp_path / "accounts.jsonl", Clock()

    def attempt(number: int, first_step: int) -> GoodputRecorder:
        clock.now += 10
        return GoodputRecorder(path, AttemptStarted(attempt=number, time=clock.now, step=first_step), Stopwatch(0.0, clock))

    killed = attempt(0, 0)
    killed.saved()
    clock.now += 30
    killed.record(5, always=True)
    stopped = attempt(1, 5)
    assert stopped.losses() == AttemptLosses(count=1, seconds=30, num_saves=1)
    clock.now += 20
    assert stopped.losses().seconds == 50
    stopped.close(8)
    assert attempt(2, 8).losses() == AttemptLosses(count=1, seconds=50, num_saves=1)
    assert attempt(3, 7).losses().count == 2


def test_the_book_goes_on_after_a_line_that_a_kill_cut_off(tmp_path: Path) -> None:
    path, clock = tmp_path / "accounts.jsonl", Clock()
    watch = Stopwatch(2.0, clock)
    book = GoodputRecorder(path, AttemptStarted(attempt=0, time=5000.0, step=0, world_size=2, device="cpu"), watch)
    with watch.during(Activity.STEPS):
        clock.now += 10
    book.record(4, always=True)
    with watch.during(Activity.STEPS):
        clock.now += 10
    book.record(8, always=False)
    book.record(8, always=True)
    text = path.read_text()
    assert len(text.splitlines()) == 3
    path.write_text(text[:-20])

    watch = Stopwatch(1.0, clock)
    again = GoodputRecorder(path, AttemptStarted(attempt=1, time=5030.0, step=4), watch)
    with watch.during(Activity.STEPS):
        clock.now += 5
    found = again.totals()
    # The start of attempt 0 lies at 4998, its latest whole record at 5010; attempt 1 started at 5029.
    assert found.total_seconds == pytest.approx(5035 - 4998)
    assert found.productive_seconds == pytest.approx(15)
    assert found.badput_seconds[Cause.BETWEEN_ATTEMPTS] == pytest.approx(19)
    again.close(5)
    assert goodput_totals(parse_records(read_lines(path.read_text()))) == found
    assert [line["kind"] for line in read_lines(path.read_text())] == ["started", "spent", "started", "spent"]


def test_records_are_written_once_in_a_while_without_a_checkpoint(tmp_path: Path) -> None:
    path, clock = tmp_path / "accounts.jsonl", Clock()
    book = GoodputRecorder(path, AttemptStarted(attempt=0, time=0.0, step=0), Stopwatch(0.0, clock))
    for step in range(10):
        clock.now += LONGEST_GAP_SECONDS / 4
        book.record(step, always=False)
    assert [line["step"] for line in read_lines(path.read_text())] == [0, 3, 7]


def test_this_process_has_an_age() -> None:
    assert 0 < process_age_seconds() < 86_400

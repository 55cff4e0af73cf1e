"""Which rank keeps the others waiting, from plain records."""

import threading
import traceback
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from finetune_job.failures import TERMINATION_LIMIT_BYTES, FailureClass
from finetune_trainer.ranks.gang import collective_timeout
from finetune_trainer.ranks.reports import root_cause
from finetune_trainer.ranks.stalls import (
    LONG_SECONDS_LEAST,
    HeartbeatRecord,
    SilenceDetector,
    Stall,
    find_stall,
    heartbeat_file_name,
    read_stall,
    remove_traces,
    stacks_name,
    stall_timeouts,
)
from finetune_trainer.ranks.watchdog import STEP, Heartbeat, main_stack, place_in_own_code


def record(
    rank: int, collectives: int, *, overdue: bool = True, waits: bool = False, idle: float = 100.0, turn: int = 1
) -> HeartbeatRecord:
    return HeartbeatRecord(
        rank=rank,
        node_rank=rank // 2,
        pid=100 + rank,
        turn=turn,
        what="step",
        step=4,
        idle_seconds=idle,
        is_overdue=overdue,
        collectives=collectives,
        is_in_collective=waits,
        at=f"file.py:{rank} in function",
    )


def judge(*records: HeartbeatRecord, silent: tuple[int, ...] = ()) -> Stall | None:
    return find_stall({one.rank: one for one in records}, silent, declared_by=0, now=1000.0)


def test_the_rank_that_entered_fewer_collectives_is_the_culprit() -> None:
    stall = judge(record(0, 12, waits=True, idle=200.0), record(1, 12, waits=True), record(2, 11, idle=90.0), record(3, 12))
    assert stall is not None
    assert (stall.rank, stall.node_rank, stall.step, stall.silent) == (2, 1, 4, [])
    assert "rank 2 has finished nothing for 90 s" in stall.message
    assert "file.py:2 in function" in stall.message


def test_waiting_for_a_rank_that_works_within_its_allowance_is_no_stall() -> None:
    assert judge(record(0, 11, overdue=False), record(1, 12, waits=True)) is None
    # Whether those who wait are overdue themselves does not matter once the one they wait for is.
    assert judge(record(0, 11), record(1, 12, overdue=False)) is not None


def test_a_silent_rank_is_the_culprit_whatever_it_said_before() -> None:
    stall = judge(record(0, 11), record(1, 12, overdue=False), record(2, 12), silent=(1,))
    assert stall is not None
    assert (stall.rank, stall.silent) == (1, [1])
    assert "at file.py:1 in function" in stall.message
    never = judge(record(0, 11), silent=(2, 1))
    assert never is not None
    assert (never.rank, never.node_rank, never.step, never.silent) == (1, None, 4, [1, 2])
    assert "it never gave a sign" in never.message


def test_of_equals_the_one_outside_of_a_collective_is_the_culprit() -> None:
    stall = judge(record(0, 12, waits=True, idle=101.0), record(1, 12))
    assert stall is not None
    assert stall.rank == 1
    hung = judge(record(0, 12, waits=True), record(1, 12, waits=True, idle=101.0))
    assert hung is not None
    assert hung.rank == 1
    assert "all ranks wait in the same collective" in hung.message


def test_a_rank_alone_is_its_own_culprit() -> None:
    stall = judge(record(0, 0))
    assert stall is not None
    assert "same collective" not in stall.message


def test_the_report_names_the_culprit_and_the_others_are_echoes() -> None:
    stall = judge(record(0, 12), record(1, 11))
    assert stall is not None
    report = stall.report(attempt=3, stacks="Thread 0x1\n" * 10_000)
    assert (report.failure, report.rank, report.step, report.attempt) == (FailureClass.STALLED, 1, 4, 3)
    assert "stacks/train-3" in report.hint
    assert len(report.envelope().encode()) <= TERMINATION_LIMIT_BYTES
    echo = stall.echo(0, 0, 3)
    assert echo.failure is FailureClass.COLLECTIVE
    assert root_cause([report, echo.model_copy(update={"time": echo.time + 1})]) == report


@given(st.integers(10, 86_400))
def test_the_watchdog_ends_all_ranks_before_any_collective_times_out(step_timeout: int) -> None:
    waits = stall_timeouts(step_timeout)
    assert waits.step == step_timeout < waits.long
    assert waits.long >= LONG_SECONDS_LEAST
    assert waits.turn < waits.silence <= 180
    assert collective_timeout(step_timeout).total_seconds() > waits.long + waits.silence + waits.turn + waits.collection


def test_a_rank_is_silent_only_after_it_was_listened_to_for_long_enough() -> None:
    now = [0.0]
    listener = SilenceDetector(3, silence=10.0, clock=lambda: now[0])
    turns = {0: 1, 1: 1}

    def listen(seconds: float, **_: int) -> list[int] | None:
        now[0] += seconds
        return listener.silent({rank: record(rank, 1, turn=turn) for rank, turn in turns.items()})

    assert listen(0) is None
    turns[0] = 2
    assert listen(5) is None
    turns[0] = 3
    assert listen(4) is None
    # Rank 2 never wrote, rank 1 wrote nothing new.
    assert listen(1) == [1, 2]
    turns.update({0: 4, 1: 2, 2: 1})
    assert listen(1) == []
    assert listen(9) == []
    assert listen(1) == [0, 1, 2]


def test_all_ranks_that_write_are_heard() -> None:
    now = [0.0]
    listener = SilenceDetector(1, silence=10.0, clock=lambda: now[0])
    assert listener.silent({0: record(0, 1, turn=1)}) is None
    now[0] = 1.0
    assert listener.silent({0: record(0, 1, turn=2)}) == []


def test_everything_is_long_until_the_first_step_is_done() -> None:
    heartbeat = Heartbeat()
    assert heartbeat.latest.is_long
    heartbeat.beat("load", 0)
    assert heartbeat.latest.is_long
    heartbeat.beat(STEP, 1)
    assert not heartbeat.latest.is_long
    heartbeat.begin("export", 1)
    assert heartbeat.latest.is_long
    heartbeat.beat("export", 1)
    assert not heartbeat.latest.is_long
    assert (heartbeat.latest.what, heartbeat.latest.step) == ("export", 1)


def test_a_rank_stands_where_its_own_code_does() -> None:
    def frame(path: str, name: str) -> traceback.FrameSummary:
        return traceback.FrameSummary(path, 7, name, lookup_line=False, line="")

    own = frame("/opt/finetune/packages/finetune_trainer/data/batches.py", "batch")
    library = frame("/opt/finetune/venv/lib/python3.11/site-packages/torch/distributed/c10d.py", "wait")
    assert place_in_own_code([own, library, frame("<frozen importlib>", "load")]) == "data/batches.py:7 in batch"
    assert place_in_own_code([library]) == "distributed/c10d.py:7 in wait"
    assert place_in_own_code([]) == "an unknown place"


def test_the_stack_of_a_thread_ends_with_its_innermost_frame() -> None:
    names = [frame.name for frame in main_stack(threading.get_ident())]
    assert names[-2:] == ["test_the_stack_of_a_thread_ends_with_its_innermost_frame", "main_stack"]
    assert main_stack(None) == []


def test_traces_of_an_earlier_run_are_removed(tmp_path: Path) -> None:
    names = [heartbeat_file_name(1), stacks_name(1), "stalled.json", heartbeat_file_name(2)]
    for name in names:
        (tmp_path / name).write_text("{}")
    assert read_stall(tmp_path) is None
    remove_traces(tmp_path, [0, 1])
    assert [path.name for path in tmp_path.iterdir()] == [heartbeat_file_name(2)]

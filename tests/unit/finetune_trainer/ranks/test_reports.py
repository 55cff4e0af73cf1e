"""Which report names the cause, and what ends up in the termination log."""

from pathlib import Path

from finetune_job.failures import FailureClass, Outcome, TerminationReport
from finetune_trainer.ranks.reports import ECHO_SECONDS, SilentEvidence, date_echo, failed_ranks, root_cause, silent_failures
from finetune_trainer.roles.train import kills_for_memory


def failed(failure: FailureClass, time: float, rank: int) -> TerminationReport:
    return date_echo(TerminationReport(role="train", outcome=Outcome.FAILED, failure=failure, rank=rank, time=time))


def test_earliest_rank_is_the_cause() -> None:
    cause = root_cause([failed(FailureClass.NON_FINITE, 12.0, 0), failed(FailureClass.DISK_FULL, 11.0, 3)])
    assert cause is not None
    assert cause.rank == 3


def test_an_echo_seen_first_is_not_the_cause() -> None:
    cause = root_cause(
        [failed(FailureClass.COLLECTIVE, 10.0, 0), failed(FailureClass.DEVICE_OUT_OF_MEMORY, 10.0 + ECHO_SECONDS / 2, 1)]
    )
    assert cause is not None
    assert cause.failure is FailureClass.DEVICE_OUT_OF_MEMORY


def test_an_echo_is_the_cause_where_nothing_else_failed() -> None:
    succeeded = TerminationReport(role="train", outcome=Outcome.SUCCEEDED, rank=2, time=1.0)
    cause = root_cause([succeeded, failed(FailureClass.COLLECTIVE, 10.0, 1), failed(FailureClass.COLLECTIVE, 9.0, 0)])
    assert cause is not None
    assert cause.rank == 0
    assert root_cause([succeeded]) is None


TORCHRUN_SUMMARY = """
E1121 torch/distributed/elastic/multiprocessing/api.py:1010] failed (exitcode: -9) local_rank: 1 (pid: 77)
============================================================
finetune_trainer.train FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-21_21:00:00
  host      : pod-0
  rank      : 4 (local_rank: 0)
  exitcode  : 47 (pid: 76)
  error_file: <N/A>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_21:00:00
  host      : pod-0
  rank      : 5 (local_rank: 1)
  exitcode  : -9 (pid: 77)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 77
"""


def test_ranks_that_said_nothing_are_found_in_torchruns_summary() -> None:
    codes = failed_ranks(TORCHRUN_SUMMARY)
    assert codes == {4: 47, 5: -9}
    heard = [failed(FailureClass.COLLECTIVE, 10.0, 4)]
    (silent,) = silent_failures(codes, heard, evidence(node_rank=2))
    assert (silent.rank, silent.node_rank, silent.failure) == (5, 2, FailureClass.INTERNAL)
    assert silent.message == "rank 5 was killed by signal 9"
    cause = root_cause([*heard, silent])
    assert cause is not None
    assert cause.rank == 5


def evidence(node_rank: int = 0, is_out_of_memory: bool = False, log: str = "") -> SilentEvidence:
    return SilentEvidence("train", 0, node_rank, is_out_of_memory, {0: log}, now=11.0)


def test_an_abort_by_the_watchdog_of_nccl_is_an_echo() -> None:
    (echo,) = silent_failures({0: -6}, [], evidence(log="[E ProcessGroupNCCL.cpp:685] Watchdog caught collective timeout"))
    assert (echo.failure, echo.time) == (FailureClass.COLLECTIVE, 11.0 + ECHO_SECONDS)
    (abort,) = silent_failures({0: -6}, [], evidence(log="terminate called after throwing an instance"))
    assert abort.failure is FailureClass.INTERNAL


def test_a_kill_is_out_of_memory_only_where_the_cgroup_says_so(tmp_path: Path) -> None:
    events = tmp_path / "memory.events"
    assert kills_for_memory([events]) == 0
    events.write_text("low 0\nhigh 0\nmax 12\noom 0\noom_kill 0\n")
    assert kills_for_memory([events]) == 0
    events.write_text("low 0\nhigh 0\nmax 12\noom 1\noom_kill 1\n")
    assert kills_for_memory([events]) == 1
    version_1 = tmp_path / "memory.oom_control"
    version_1.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert kills_for_memory([tmp_path / "absent", version_1]) == 1
    (silent,) = silent_failures({0: -9}, [], evidence(is_out_of_memory=True))
    assert silent.failure is FailureClass.HOST_OUT_OF_MEMORY
    (other,) = silent_failures({0: -11}, [], evidence(is_out_of_memory=True))
    assert other.failure is FailureClass.INTERNAL

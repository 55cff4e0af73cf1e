"""Which report names the cause, and what ends up in the termination log."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from finetune_job.failures import EXIT_CODES, TERMINATION_LIMIT_BYTES, FailureClass, Outcome, TerminationReport, parse_envelope
from finetune_trainer.__main__ import main
from finetune_trainer.errors import DataError, PreemptedError, TrainerError, classify
from finetune_trainer.ranks.logs import CappedFile
from finetune_trainer.ranks.reports import ECHO_SECONDS, SilentEvidence, dated, failed_ranks, root_cause, silent_failures
from finetune_trainer.roles.train import was_out_of_memory
from finetune_trainer.termination import failure_report, run_role


def failed(failure: FailureClass, time: float, rank: int) -> TerminationReport:
    return dated(TerminationReport(role="train", outcome=Outcome.FAILED, failure=failure, rank=rank, time=time))


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
    assert not was_out_of_memory([events])
    events.write_text("low 0\nhigh 0\nmax 12\noom 0\noom_kill 0\n")
    assert not was_out_of_memory([events])
    events.write_text("low 0\nhigh 0\nmax 12\noom 1\noom_kill 1\n")
    assert was_out_of_memory([events])
    version_1 = tmp_path / "memory.oom_control"
    version_1.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert was_out_of_memory([tmp_path / "absent", version_1])
    (silent,) = silent_failures({0: -9}, [], evidence(is_out_of_memory=True))
    assert silent.failure is FailureClass.HOST_OUT_OF_MEMORY
    (other,) = silent_failures({0: -11}, [], evidence(is_out_of_memory=True))
    assert other.failure is FailureClass.INTERNAL


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (DataError("no records"), FailureClass.USER_DATA),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), FailureClass.DEVICE_OUT_OF_MEMORY),
        (OSError(errno.ENOSPC, "No space left on device", "/claims/w/x"), FailureClass.DISK_FULL),
        (OSError(errno.EACCES, "Permission denied"), FailureClass.INTERNAL),
        (RuntimeError("[pair.cc:561] Connection closed by peer [10.0.0.7]:13237"), FailureClass.COLLECTIVE),
        (torch.distributed.DistBackendError("NCCL error in: unhandled system error"), FailureClass.COLLECTIVE),
        (torch.distributed.DistNetworkError("The client socket has timed out"), FailureClass.COLLECTIVE),
        (SafetensorError("header too large"), FailureClass.USER_MODEL),
        (MemoryError(), FailureClass.HOST_OUT_OF_MEMORY),
        (ValueError("something else"), FailureClass.INTERNAL),
    ],
    ids=lambda value: getattr(value, "name", None) or type(value).__name__,
)
def test_exceptions_of_libraries_have_a_class(error: BaseException, expected: FailureClass) -> None:
    assert classify(error)[0] is expected


def test_the_cause_of_an_exception_is_classified_too() -> None:
    error = ValueError("could not write")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device", "/claims/w/rank-00000.safetensors")
    assert classify(error)[0] is FailureClass.DISK_FULL


def test_a_failing_role_leaves_an_envelope_that_fits(tmp_path: Path) -> None:
    log = tmp_path / "termination-log"

    def body() -> TerminationReport:
        raise DataError("x" * 20_000, hint="shorten it")

    assert run_role("train", 2, body, log, lambda: None) == EXIT_CODES[FailureClass.USER_DATA]
    assert log.stat().st_size <= TERMINATION_LIMIT_BYTES
    report = parse_envelope(log.read_text())
    assert report is not None
    assert (report.role, report.attempt, report.failure, report.outcome) == ("train", 2, FailureClass.USER_DATA, Outcome.FAILED)


def test_a_report_of_preemption_names_the_step() -> None:
    report = failure_report(PreemptedError("stopped", step=7), "train", 0, rank=1)
    assert (report.step, report.rank, report.failure) == (7, 1, FailureClass.PREEMPTED)
    assert TrainerError("x").step is None


@pytest.mark.parametrize("content", ["{}", "not the plan", None])
def test_a_plan_with_another_digest_is_refused(tmp_path: Path, content: str | None) -> None:
    plan = tmp_path / "plan.json"
    if content is not None:
        plan.write_text(content)
    log = tmp_path / "log"
    arguments = {"--plan": plan, "--plan-sha256": "0" * 64, "--termination-log": log, "--claims-root": tmp_path}
    code = main(["train", *(str(part) for pair in arguments.items() for part in pair)])
    assert code == EXIT_CODES[FailureClass.PLAN_MISMATCH]
    assert json.loads(log.read_text())["failure"] == "PlanMismatch"


def test_logs_are_capped_and_keep_the_newest(tmp_path: Path) -> None:
    log = CappedFile(tmp_path / "rank.log", cap_bytes=100)
    for number in range(100):
        log.write(b"line %04d\n" % number)
    log.close()
    kept = (tmp_path / "rank.log.previous").read_bytes() + (tmp_path / "rank.log").read_bytes()
    assert len(kept) <= 200
    assert kept.endswith(b"line 0098\nline 0099\n")
    assert (tmp_path / "rank.log").stat().st_size <= 100


def test_reading_roles_needs_no_torch() -> None:
    """The supervisor and its reports must not take torch's seconds and memory in every pod."""
    import subprocess

    code = "import sys, finetune_trainer.__main__, finetune_trainer.roles.train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

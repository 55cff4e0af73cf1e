"""The command of a role, and how its end is told."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from finetune_cli.local.launch import RoleArguments, outcome
from finetune_job.failures import EXIT_CODES, FailureClass, Outcome, TerminationReport
from finetune_job.names import Role


def report(failure: FailureClass | None = None, result: Outcome = Outcome.FAILED) -> TerminationReport:
    return TerminationReport(role="train", outcome=result, failure=failure)


def test_the_command_of_a_role():
    order = RoleArguments(Role.TRAIN, 3, Path("/p/plan.json"), "abc", Path("/c"), Path("/t"), lock=0)
    command = order.command(29500)
    assert command[1:4] == ["-m", "finetune_trainer", "train"]
    text = " ".join(command)
    for part in ("--plan /p/plan.json", "--plan-sha256 abc", "--claims-root /c", "--attempt 3", "--termination-log /t"):
        assert part in text
    assert "--node-rank 0 --master-address 127.0.0.1 --master-port 29500 --observe-port 0" in text
    assert "--node-rank" not in RoleArguments(Role.MERGE, 0, Path("p"), "a", Path("c"), Path("t"), lock=0).command(1)


@pytest.mark.parametrize(
    ("code", "said", "expected"),
    [
        (0, report(None, Outcome.SUCCEEDED), (Outcome.SUCCEEDED, None)),
        (0, None, (Outcome.SUCCEEDED, None)),
        (EXIT_CODES[FailureClass.USER_DATA], report(FailureClass.USER_DATA), (Outcome.FAILED, FailureClass.USER_DATA)),
        (EXIT_CODES[FailureClass.USER_DATA], None, (Outcome.FAILED, FailureClass.USER_DATA)),
        (40, report(None, Outcome.REFUSED), (Outcome.REFUSED, FailureClass.USER_CONFIG)),
        # A report that claims success while the process failed is left over from before the failure.
        (-signal.SIGKILL, report(None, Outcome.SUCCEEDED), (Outcome.FAILED, FailureClass.INTERNAL)),
        (1, None, (Outcome.FAILED, FailureClass.INTERNAL)),
    ],
)
def test_how_a_role_ended(code, said, expected):
    found = outcome(Role.TRAIN, 0, code, said, Path("train-0.log"))
    assert (found.outcome, found.failure) == expected

"""What counts as a process that still runs."""

import os
import subprocess
import sys

import psutil
import pytest

from tests.support.living import living


def test_one_that_runs_lives_and_one_that_ended_does_not() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as running:
        process = psutil.Process(running.pid)
        assert living([process]) == [process]
        running.kill()
        os.waitid(os.P_PID, running.pid, os.WEXITED | os.WNOWAIT)
        assert process.status() == psutil.STATUS_ZOMBIE
        assert living([process]) == []
    assert living([process]) == []


def test_one_that_ends_between_two_questions_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(process: psutil.Process) -> str:
        raise psutil.NoSuchProcess(process.pid)

    monkeypatch.setattr(psutil.Process, "status", gone)
    assert living([psutil.Process()]) == []

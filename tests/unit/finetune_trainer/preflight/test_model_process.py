"""The process that prepares data does without torch: the model is looked at in another one, with the same answer.

Here that one is a fork; tests/unit/finetune_trainer/roles/test_rehearse.py starts it.
"""

import fcntl
import os
import pickle
import resource
import signal
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from finetune_job.failures import FailureClass
from finetune_trainer.errors import classify
from finetune_trainer.preflight.model_process import ModelCheckError, ModelCheckKilledError, check_model
from finetune_trainer.processes import sandbox
from finetune_trainer.processes.child import ChildOutput, fork
from finetune_trainer.roles import rehearse
from finetune_trainer.roles.rehearse import ModelProcess
from tests.support.forked_ranks import run_processes


def forked(context, work=None):
    """What a fork of a process that has imported the libraries says, and which child it was.

    work: what the fork of that one does in the place of its own, which is to look at the model.
    """
    answer = context.claims_root / "answer"
    assert run_processes([partial(_fork, context, work, answer)]) == [0]
    return pickle.loads(answer.read_bytes())


_others: set[int] = set()
"""Pipes of the process which stands for a served role, that are no part of the product."""


def _pipes_to_write_to():
    held = [number for number in range(3, 200) if os.path.exists(f"/proc/self/fd/{number}")]  # noqa: PTH110
    pipes = [number for number in held if stat.S_ISFIFO(os.fstat(number).st_mode)]
    return {number for number in pipes if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY}


def _fork(context, work, answer):
    _others.update(_pipes_to_write_to())
    if work is not None:
        rehearse.check_within_bounds = work
    with _ForkedProcess(context) as process:
        try:
            found = process.check()
        except ModelCheckError as error:
            found = error
        with Path(os.devnull).open("wb") as nothing:
            os.dup2(nothing.fileno(), process._commands)
        assert process._child.wait(120.0) == 0, "it ends when nobody can tell it anything any more"
    answer.write_bytes(pickle.dumps(found))


class _ForkedProcess(ModelProcess):
    """The process as a fork of this one, so that what it does can be replaced here."""

    def _start(self, commands):
        reading, writing = os.pipe()

        def work():
            os.close(self._commands)
            devices = os.environ.get(rehearse.DEVICES)
            os.environ.update(rehearse.on_cpu())
            with os.fdopen(writing, "w") as answer:
                model, scratch = self._context.base_model.absolute(), self._scratch.absolute()
                rehearse._obey(rehearse._Order(self._context.plan, model, scratch, answer), commands, devices)

        child = fork(work, ChildOutput(reading, rehearse.ANSWER_BYTES))
        os.close(writing)
        return child


def test_a_fork_of_a_process_that_has_imported_finds_the_same(context, model):
    assert forked(context()) == check_model(context().plan, model)


def test_its_findings_arrive(context):
    structure, findings = forked(context({"method.lora.targetModules": ["nowhere"]}))
    assert structure is None
    assert any("nowhere" in finding.message + finding.value for finding in findings)


@pytest.mark.parametrize(
    ("command", "error", "failure"),
    [("exit 3", ModelCheckError, FailureClass.INTERNAL), ("kill -9 $$", ModelCheckKilledError, FailureClass.HOST_OUT_OF_MEMORY)],
)
def test_a_process_that_fails_is_reported(context, tmp_path, monkeypatch, command, error, failure):
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    with ModelProcess(context()) as process, pytest.raises(error) as caught:
        process.check()
    assert classify(caught.value)[0] is failure


def _dies(plan, model):
    os.kill(os.getpid(), signal.SIGKILL)


def _raises(plan, model):
    raise ValueError("no such luck")


def _takes_all_its_time(plan, model):
    os.kill(os.getpid(), signal.SIGXCPU)


def _has_one_pipe(plan, model):
    assert len(_pipes_to_write_to() - _others) == 1
    return b"[null, []]"


def test_a_fork_that_dies_is_told_from_one_that_runs_out_of_time(context):
    assert isinstance(forked(context(), _dies), ModelCheckKilledError)


def test_a_fork_that_raises_is_a_failure_of_the_check(context):
    error = forked(context(), _raises)
    assert not isinstance(error, ModelCheckKilledError)
    assert "ended with status 1" in str(error)


def test_a_fork_that_takes_all_its_time_is_a_finding(context):
    structure, (finding,) = forked(context(), _takes_all_its_time)
    assert structure is None
    assert (finding.rule, finding.severity) == ("model-not-accepted", "error")
    assert "takes more than 300 s of CPU time" in finding.message


def test_a_fork_that_a_model_took_over_cannot_speak_for_the_process(context):
    """It holds one pipe to write to, which is that of its own answer."""
    assert forked(context(), _has_one_pipe) == (None, [])


def test_a_fork_has_the_bounds_of_the_sandbox(context, model, monkeypatch):
    """Run here: nothing else may have lowered them."""

    def bounds(plan, directory):
        limits = [resource.getrlimit(which)[0] for which in (resource.RLIMIT_CPU, resource.RLIMIT_DATA, resource.RLIMIT_CORE)]
        return None, [rehearse.not_done_finding(" ".join(map(str, limits)), directory)]

    monkeypatch.setattr("finetune_trainer.preflight.model_process.check_model", bounds)
    monkeypatch.setattr(sandbox, "DATA_BYTES", 1 << 32)
    order = rehearse._Order(context().plan, model, model, sys.stdout)
    ended = rehearse._look(order, (), {})
    _, (finding,) = rehearse.checked(ended, model)
    seconds, memory, core = map(int, finding.message.rsplit(": ", 1)[1].split())
    assert 300 <= seconds < 330
    assert (1 << 32) < memory < (1 << 40)
    assert core == 0
    assert resource.getrlimit(resource.RLIMIT_CPU)[0] != seconds


def test_preflight_itself_needs_no_torch():
    code = (
        "from finetune_trainer.processes.start import keep_torch_out; keep_torch_out(); import finetune_trainer.roles.preflight"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, env=os.environ).returncode == 0

"""The process that prepares data does without torch: the model is looked at in another one, with the same answer."""

import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from finetune_job.failures import FailureClass
from finetune_trainer.errors import classify
from finetune_trainer.preflight.model_process import ModelCheckError, ModelCheckKilledError, check_model
from finetune_trainer.processes import sandbox
from finetune_trainer.roles import rehearse
from finetune_trainer.roles.rehearse import ModelProcess
from tests.support.forked_ranks import run_processes


def test_the_other_process_finds_the_same(context, model):
    expected = check_model(context().plan, model)
    with ModelProcess(context()) as process:
        assert process.check() == expected
    assert expected[0].trainable


def _check_as_fork(context, expected):
    with ModelProcess(context, is_forked=True) as process:
        return process.check() != expected or process._child.pid == os.getpid()


def test_a_fork_of_a_process_that_has_imported_finds_the_same(context, model):
    assert run_processes([partial(_check_as_fork, context(), check_model(context().plan, model))]) == [0]


def test_its_findings_arrive(context):
    with ModelProcess(context({"method.lora.targetModules": ["nowhere"]})) as process:
        structure, findings = process.check()
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


FORKED = """
import os, signal, sys
from finetune_trainer.roles import rehearse
def look(plan, model):
    {work}
rehearse.check_within_bounds = look
sys.exit(rehearse.main(sys.argv[1:]))
"""


def forked(context, tmp_path, monkeypatch, work):
    """The answer of the process where its fork does this instead of its work."""
    program = tmp_path / "program.py"
    program.write_text(FORKED.format(work=work))
    shell = tmp_path / "python"
    shell.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {program} "$@"\n')
    shell.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(shell))
    with ModelProcess(context()) as process:
        return process.check()


def test_a_fork_that_dies_is_told_from_one_that_runs_out_of_time(context, tmp_path, monkeypatch):
    with pytest.raises(ModelCheckKilledError):
        forked(context, tmp_path, monkeypatch, "os.kill(os.getpid(), signal.SIGKILL)")


def test_a_fork_that_raises_is_a_failure_of_the_check(context, tmp_path, monkeypatch):
    with pytest.raises(ModelCheckError, match="ended with status 1"):
        forked(context, tmp_path, monkeypatch, "raise ValueError('no such luck')")


def test_a_fork_that_takes_all_its_time_is_a_finding(context, tmp_path, monkeypatch):
    structure, (finding,) = forked(context, tmp_path, monkeypatch, "os.kill(os.getpid(), signal.SIGXCPU)")
    assert structure is None
    assert (finding.rule, finding.severity) == ("model-not-accepted", "error")
    assert "takes more than 300 s of CPU time" in finding.message


def test_a_fork_that_a_model_took_over_cannot_speak_for_the_process(context, tmp_path, monkeypatch):
    """It holds one pipe to write to, which is that of its own answer."""
    held = "[number for number in range(3, 200) if os.path.exists(f'/proc/self/fd/{number}')]"
    writable = f"[number for number in {held} if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY]"
    work = f"import fcntl; assert len({writable}) == 1; return b'[null, []]'"
    assert forked(context, tmp_path, monkeypatch, work) == (None, [])


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


def test_a_process_that_is_told_nothing_ends_with_its_commands(context):
    with ModelProcess(context()) as process, Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), process._commands)
        assert process._child.wait(120.0) == 0


def test_libraries_are_imported_without_a_thread_or_a_device():
    """A fork copies neither."""
    code = (
        "import os, signal\n"
        "from finetune_trainer.roles.rehearse import import_libraries, on_cpu\n"
        "os.environ.update(on_cpu())\n"
        "from tests.support.tiny_model import plan_of, tiny_spec\n"
        "import_libraries(plan_of(tiny_spec()))\n"
        "import torch\n"
        "print(len(os.listdir('/proc/self/task')), torch.cuda.is_initialized(), torch.get_num_threads())"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, env=os.environ, capture_output=True, text=True)
    assert done.stdout.split() == ["1", "False", "1"], done.stderr


def test_preflight_itself_needs_no_torch():
    code = (
        "from finetune_trainer.processes.start import keep_torch_out; keep_torch_out(); import finetune_trainer.roles.preflight"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, env=os.environ).returncode == 0

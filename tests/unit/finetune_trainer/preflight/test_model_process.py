"""The process that prepares data does without torch: the model is inspected by another program, with the same answer."""

import io
import os
import resource
import signal
import subprocess
import sys

import pytest

from finetune_job.failures import FailureClass
from finetune_trainer.errors import classify
from finetune_trainer.preflight import model_process
from finetune_trainer.preflight.model_process import (
    ModelCheckError,
    ModelCheckKilledError,
    check_model,
    finish_check,
    start_check,
)
from finetune_trainer.processes import sandbox
from finetune_trainer.processes.child import ChildOutput, fork, wait_for_answer
from finetune_trainer.rehearsal.verdicts import not_done_finding


@pytest.mark.parametrize("targets", ["q_proj", "nowhere"])
def test_the_program_finds_what_this_process_finds(context, model, targets):
    plan = context({"method.lora.targetModules": [targets]}).plan
    structure, findings = check_model(plan, model)
    assert (structure is None, bool(findings)) == (targets == "nowhere", targets == "nowhere")
    assert finish_check(start_check(plan, model), model) == (structure, findings)


def started_as(command, context, tmp_path, monkeypatch):
    """The answer of a program that is started instead of Python."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    job = context()
    return finish_check(start_check(job.plan, job.base_model), job.base_model)


@pytest.mark.parametrize(
    ("command", "error", "failure"),
    [("exit 3", ModelCheckError, FailureClass.INTERNAL), ("kill -9 $$", ModelCheckKilledError, FailureClass.HOST_OUT_OF_MEMORY)],
)
def test_a_process_that_fails_is_reported(context, tmp_path, monkeypatch, command, error, failure):
    with pytest.raises(error) as caught:
        started_as(command, context, tmp_path, monkeypatch)
    assert classify(caught.value)[0] is failure


def test_a_process_that_takes_all_its_time_is_a_finding(context, tmp_path, monkeypatch):
    structure, (finding,) = started_as(f"kill -{int(signal.SIGXCPU)} $$", context, tmp_path, monkeypatch)
    assert structure is None
    assert (finding.rule, finding.severity) == ("model-not-accepted", "error")
    assert "takes more than 300 s of CPU time" in finding.message


def test_the_program_has_the_bounds_of_the_sandbox(context, model, monkeypatch):
    """In a fork: the bounds of a process cannot be raised again."""

    def bounds(plan, directory):
        limits = [resource.getrlimit(which)[0] for which in (resource.RLIMIT_CPU, resource.RLIMIT_DATA, resource.RLIMIT_CORE)]
        return None, [not_done_finding(" ".join(map(str, limits)), directory)]

    monkeypatch.setattr(model_process, "check_model", bounds)
    monkeypatch.setattr(sandbox, "DATA_BYTES", 1 << 32)
    monkeypatch.setattr(sys, "argv", ["model_process", "--parent", str(os.getpid()), "--model", str(model)])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(context().plan.model_dump_json().encode())))
    reading, writing = os.pipe()

    def answer():
        os.dup2(writing, 1)
        model_process.main()

    child = fork(answer, ChildOutput(reading, 1 << 20))
    os.close(writing)
    _, (finding,) = model_process._CHECKED.validate_json(wait_for_answer(child, 300).answer)
    seconds, memory, core = map(int, finding.message.rsplit(": ", 1)[1].split())
    assert 300 <= seconds < 10_000
    assert (1 << 32) < memory < (1 << 40)
    assert core == 0


def test_preflight_itself_needs_no_torch():
    code = (
        "from finetune_trainer.processes.start import keep_torch_out; keep_torch_out(); import finetune_trainer.roles.preflight"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, env=os.environ).returncode == 0

"""The process that prepares data does without torch: the model is looked at in another one, with the same answer."""

import os
import subprocess
import sys

import pytest

from finetune_job.failures import FailureClass
from finetune_trainer.errors import classify
from finetune_trainer.preflight import model_process
from finetune_trainer.preflight.model_process import ModelCheckError, ModelCheckKilledError, check_model


@pytest.fixture
def without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)


def shell(tmp_path, monkeypatch, command):
    """What is started instead of Python."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)
    monkeypatch.setattr(model_process.sys, "executable", str(path))


def test_the_other_process_finds_the_same(context, model, monkeypatch):
    plan = context().plan
    expected = check_model(plan, model)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert check_model(plan, model) == expected
    assert expected[0].trainable


def test_its_findings_arrive(context, model, without_torch):
    structure, findings = check_model(context({"method.lora.targetModules": ["nowhere"]}).plan, model)
    assert structure is None
    assert any("nowhere" in finding.message + finding.value for finding in findings)


@pytest.mark.parametrize(
    ("command", "error", "failure"),
    [("exit 3", ModelCheckError, FailureClass.INTERNAL), ("kill -9 $$", ModelCheckKilledError, FailureClass.HOST_OUT_OF_MEMORY)],
)
def test_a_process_that_fails_is_reported(context, model, tmp_path, monkeypatch, without_torch, command, error, failure):
    shell(tmp_path, monkeypatch, command)
    with pytest.raises(error) as caught:
        check_model(context().plan, model)
    assert classify(caught.value)[0] is failure


def test_preflight_itself_needs_no_torch():
    code = (
        "from finetune_trainer.processes.start import keep_torch_out; keep_torch_out(); import finetune_trainer.roles.preflight"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, env=os.environ).returncode == 0

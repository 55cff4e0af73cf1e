"""The programs that preflight starts, taken over by the model that they look at: a verdict in bounded time and memory."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from finetune_trainer.inspection.report import Verdict
from finetune_trainer.preflight import model_process
from finetune_trainer.preflight.model_process import ModelCheckError
from finetune_trainer.processes import child, sandbox
from finetune_trainer.roles import rehearse
from tests.support.living import living
from tests.unit.finetune_trainer.preflight.conftest import claims, context, made_claims, manifest, model

__all__ = ["claims", "context", "made_claims", "manifest", "model"]

COMMANDS = {
    "garbage": r"printf '\200\004garbage\n{\"report\": 1}\n'",
    "without_end": "exec cat /dev/zero",
    "never": "exec sleep 3600",
    "closed": "exec sleep 3600 >&-",
}


@pytest.fixture(autouse=True)
def bounded() -> Any:
    """No process is left, and none of this one's memory taken."""
    before, resident = psutil.Process().children(recursive=True), psutil.Process().memory_info().rss
    yield
    assert [each for each in living(psutil.Process().children(recursive=True)) if each not in before] == []
    assert psutil.Process().memory_info().rss - resident < 256 << 20


@pytest.fixture(params=COMMANDS)
def behaviour(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the program does that is started instead of Python."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{COMMANDS[request.param]}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    if request.param == "closed":
        monkeypatch.setattr(child, "ENDING_SECONDS", 0.5)
    if request.param == "never":
        monkeypatch.setattr(sandbox, "WALL_SECONDS", 1.0)
        monkeypatch.setattr(model_process, "WALL_SECONDS", 1.0)
        monkeypatch.setattr(rehearse, "SECONDS", 1.0)
        monkeypatch.setattr(rehearse, "ENDING_SECONDS", 0.0)
    return str(request.param)


def test_the_check_of_the_model(behaviour: str, context: Any) -> None:
    job = context()
    child = model_process.start_check(job.plan, job.base_model)
    if behaviour == "garbage":
        with pytest.raises(ModelCheckError, match="answered with something other than a structure"):
            model_process.finish_check(child, job.base_model)
        return
    structure, (finding,) = model_process.finish_check(child, job.base_model)
    assert structure is None
    assert (finding.rule, finding.severity, finding.field) == ("model-not-accepted", "error", "spec.model.source")
    said = {
        "without_end": "wrote more than it may",
        "never": "does not end within 1 s",
        "closed": "closed its output and did not end",
    }
    assert said[behaviour] in finding.message


def test_the_rehearsal(behaviour: str, context: Any) -> None:
    job = context({"preflight.rehearsal": "Run"})
    with ExitStack() as until_done:
        report = rehearse.start_rehearsal(job, until_done)()
    assert report.verdict is Verdict.NOT_DONE
    (finding,) = report.findings
    assert (finding.rule, finding.severity) == ("rehearsal-not-done", "warning")
    said = {
        "garbage": "its process exited with status 0",
        "without_end": "wrote more than it may",
        "never": "did not end in time",
        "closed": "closed its output and did not end",
    }
    assert said[behaviour] in finding.message
    assert not list(job.workspace.root.glob("rehearsal*"))

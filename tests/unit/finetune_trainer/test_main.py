"""The entry point of all roles."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune_job.failures import EXIT_CODES, FailureClass, Outcome, TerminationReport, parse_envelope
from finetune_job.names import Role
from finetune_trainer import __main__ as entry
from finetune_trainer.context import RunContext
from tests.support.tiny_model import run_context, tiny_spec


def test_reading_roles_needs_no_torch() -> None:
    """The supervisor and its reports must not take torch's seconds and memory in every pod."""
    import subprocess

    code = "import sys, finetune_trainer.__main__, finetune_trainer.roles.train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def train(tmp_path: Path, *more: str) -> tuple[int, TerminationReport | None]:
    """One training role; the exit code and what it told the kubelet."""
    context, log = run_context(tmp_path, tiny_spec()), tmp_path / "termination"
    given: dict[str, Any] = {
        "--plan": context.workspace.root / "plan.json",
        "--plan-sha256": context.plan_sha256,
        "--claims-root": context.claims_root,
        "--termination-log": log,
        "--attempt": 3,
    }
    code = entry.main(["train", *(str(part) for pair in given.items() for part in pair), *more])
    return code, parse_envelope(log.read_text())


@pytest.mark.parametrize(
    ("more", "taken", "attempt", "waits"),
    [
        ((), None, 3, None),
        (("--attempt-file", "/attempt/number"), 3, 3, None),
        (("--attempt-file", "/attempt/number"), 4, 4, Path("/attempt/number")),
    ],
    ids=["no file", "the first container", "the second"],
)
def test_a_container_that_was_started_again_waits_for_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], taken: int | None, attempt: int, waits: Path | None
) -> None:
    seen: list[tuple[int, Path | None]] = []

    def role(context: RunContext, arguments: argparse.Namespace) -> TerminationReport:
        seen.append((context.attempt, arguments.attempt_file))
        raise RuntimeError("a fault")

    def take(first: int) -> int:
        assert first == 3
        assert taken is not None, "a container without the file has nothing to take"
        return taken

    monkeypatch.setattr(entry, "take_attempt", take)
    monkeypatch.setitem(entry.ROLES, Role.TRAIN, role)
    code, report = train(tmp_path, *more)
    assert seen == [(attempt, waits)]
    assert code == EXIT_CODES[FailureClass.INTERNAL]
    assert report is not None
    assert (report.attempt, report.outcome) == (attempt, Outcome.FAILED)


def test_an_attempt_that_the_operator_does_not_name_ends_as_preempted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from finetune_trainer.roles import train as module

    monkeypatch.setattr(entry, "take_attempt", lambda _first: 4)
    monkeypatch.setattr(module, "wait_until_told", lambda path, attempt, _stopped: (path, attempt) == (Path("told"), 5))
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    code, report = train(tmp_path, "--attempt-file", "told")
    assert code == EXIT_CODES[FailureClass.PREEMPTED]
    assert report is not None
    said = "attempt 4 did not begin in the pod of the one before: the operator did not name it within 300 s"
    assert (report.failure, report.attempt, report.message) == (FailureClass.PREEMPTED, 4, said)

"""The publish role brings a complete release to one destination, and reports where it is."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

import pytest

from finetune_job.failures import Outcome
from finetune_trainer.credentials import Credentials
from finetune_trainer.errors import CheckpointError, InvariantError, PreemptedError
from finetune_trainer.network.retry import StoppedError
from finetune_trainer.publish.destination import Publication
from finetune_trainer.release.checksums import read_release
from finetune_trainer.release.files import Release
from finetune_trainer.release.write import write_release_files
from finetune_trainer.roles import publish as role
from tests.unit.finetune_trainer.release.example import Example, example

LOCAL = Credentials(Path("/no/such/directory"))


class FakeDestination:
    def __init__(self, error: Exception | None = None, *, is_terminated: bool = False) -> None:
        self.error, self.is_terminated = error, is_terminated
        self.release: Release | None = None

    def publish(self, release: Release) -> Publication:
        self.release = release
        if self.is_terminated:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.error is not None:
            raise self.error
        return Publication("hf://team/tuned@abc", "abc", 17)


@pytest.fixture
def made(tmp_path: Path) -> Example:
    found = example(tmp_path, {"output.destination": "hf://team/tuned"})
    write_release_files(found.context.output, found.results())
    return found


def send_to(monkeypatch: pytest.MonkeyPatch, destination: FakeDestination) -> FakeDestination:
    monkeypatch.setattr(role, "_open", lambda *_: destination)
    return destination


def test_the_report_says_where_the_release_is(made: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    destination = send_to(monkeypatch, FakeDestination())
    report = role.publish(made.context, LOCAL)
    release = read_release(made.context)
    assert destination.release == release
    assert report.outcome is Outcome.SUCCEEDED
    assert {name: report.facts[name] for name in ("address", "digest", "bytes_sent")} == {
        "address": "hf://team/tuned@abc",
        "digest": "abc",
        "bytes_sent": "17",
    }
    assert report.facts["bytes"] == str(sum(file.size for file in release.files) + release.manifest.size)


def test_a_stop_by_sigterm_is_a_preemption_and_the_handler_is_given_back(made: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    send_to(monkeypatch, FakeDestination(StoppedError("stopped"), is_terminated=True))
    with pytest.raises(PreemptedError, match="SIGTERM"):
        role.publish(made.context, LOCAL)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_stop_for_another_reason_keeps_it(made: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    send_to(monkeypatch, FakeDestination(StoppedError("stopped")))
    with pytest.raises(StoppedError):
        role.publish(made.context, LOCAL)


def test_a_plan_that_publishes_nothing_is_a_mistake_of_ours(made: Example) -> None:
    plan = made.context.plan.model_copy(update={"publish": None})
    with pytest.raises(InvariantError, match="publishes nothing"):
        role.publish(dataclasses.replace(made.context, plan=plan), LOCAL)


def test_incomplete_results_are_not_sent(made: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    destination = send_to(monkeypatch, FakeDestination())
    made.context.output.checksums.unlink()
    with pytest.raises(CheckpointError, match="SHA256SUMS"):
        role.publish(made.context, LOCAL)
    assert destination.release is None

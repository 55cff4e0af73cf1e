"""The publish role brings a complete release to one destination, and reports where it is."""

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from finetune_job.api.base import HubPath
from finetune_job.failures import Outcome
from finetune_trainer.credentials import Credentials
from finetune_trainer.errors import CheckpointError, InvariantError, PreemptedError
from finetune_trainer.network.retry import StoppedError
from finetune_trainer.publish.destination import Publication
from finetune_trainer.release.checksums import parse_checksums, read_release
from finetune_trainer.release.files import Release
from finetune_trainer.release.write import write_release_files
from finetune_trainer.roles import publish as role
from tests.unit.finetune_trainer.release.example import Example, example
from tests.unit.finetune_trainer.release.test_sign import P256, make_key

LOCAL = Credentials(Path("/no/such/directory"))


class FakeDestination:
    def __init__(self, error: Exception | None = None, *, is_terminated: bool = False) -> None:
        self.error, self.is_terminated = error, is_terminated
        self.releases: list[Release] = []
        self.places: list[str] = []

    def publish(self, release: Release) -> Publication:
        self.releases.append(release)
        if self.is_terminated:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.error is not None:
            raise self.error
        return Publication(f"hf://{self.places[-1]}@abc", "abc", 17)


@pytest.fixture
def made(tmp_path: Path) -> Example:
    found = example(tmp_path, {"output.destination": "hf://team/tuned"})
    write_release_files(found.context.output, found.results())
    return found


def send_to(monkeypatch: pytest.MonkeyPatch, destination: FakeDestination) -> FakeDestination:
    def open_(_plan: object, place: HubPath, *_: object, **_more: object) -> FakeDestination:
        destination.places.append(place.repository)
        return destination

    monkeypatch.setattr(role, "_open", open_)
    return destination


def test_the_report_says_where_the_release_is(made: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    destination = send_to(monkeypatch, FakeDestination())
    report = role.publish(made.context, LOCAL)
    assert destination.places == ["team/tuned-adapter", "team/tuned"]  # the second one is there only if both are
    adapter, merged = destination.releases
    assert {file.name for file in adapter.files} == {
        *("README.md", "adapter_config.json", "adapter_model.safetensors", "manifest.json", "provenance.json")
    }
    whole = {file.sha256 for file in read_release(made.context).files}
    assert {file.sha256 for file in (*adapter.files, *merged.files)} == whole
    assert not [file.name for file in merged.files if "adapter" in file.name]
    assert report.outcome is Outcome.SUCCEEDED
    assert {name: report.facts[name] for name in ("address", "adapter_address", "digest", "bytes_sent")} == {
        "address": "hf://team/tuned@abc",
        "adapter_address": "hf://team/tuned-adapter@abc",
        "digest": "abc",
        "bytes_sent": "34",
    }
    sent = [file for part in (adapter, merged) for file in (*part.files, part.manifest)]
    assert report.facts["bytes"] == str(sum(file.size for file in sent))


@pytest.mark.parametrize("changes", [{"output.adapter": False}, {"merge.enabled": False}], ids=["merged", "adapter"])
def test_a_result_alone_takes_the_destination_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: Any) -> None:
    alone = example(tmp_path, {"output.destination": "hf://team/tuned", **changes})
    write_release_files(alone.context.output, alone.results())
    destination = send_to(monkeypatch, FakeDestination())
    assert "adapter_address" not in role.publish(alone.context, LOCAL).facts
    assert (destination.places, destination.releases) == (["team/tuned"], [read_release(alone.context)])


def test_each_repository_has_a_list_of_its_files_and_a_signature_of_it(
    made: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "signing").mkdir()
    (tmp_path / "signing/key").write_text(make_key(tmp_path / "signing.key", *P256))
    seen: list[tuple[dict[str, str], bytes]] = []

    class Reading(FakeDestination):
        def publish(self, release: Release) -> Publication:
            [signature] = [file.local.read_bytes() for file in release.files if file.name == "SHA256SUMS.sig"]
            listed = parse_checksums(release.manifest.local.read_text())
            assert listed == {file.name: file.sha256 for file in release.files if file.name != "SHA256SUMS.sig"}
            seen.append((listed, signature))
            return super().publish(release)

    send_to(monkeypatch, Reading())
    role.publish(made.context, Credentials(tmp_path))
    (of_adapter, first), (of_merged, second) = seen
    assert of_adapter["provenance.json"] == of_merged["provenance.json"]
    assert of_adapter["README.md"] != of_merged["README.md"]
    assert first != second


@pytest.mark.parametrize("name", ["SHA256SUMS", "SHA256SUMS.sig", "provenance.json"])
def test_a_file_that_somebody_has_put_next_to_the_adapter_takes_no_name_of_ours(
    made: Example, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (made.context.output.adapter / name).write_text("forged")
    write_release_files(made.context.output, made.results())
    destination = send_to(monkeypatch, FakeDestination())
    with pytest.raises(CheckpointError, match=f"the adapter's directory has {name}"):
        role.publish(made.context, LOCAL)
    assert destination.releases == []


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
    assert destination.releases == []

"""The commit that the Hub names is told where a manifest has none, and `--fix` writes it."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from finetune_cli.app import app
from finetune_cli.checks import commits
from finetune_job.rules.sources import NO_COMMIT
from tests.support.hub import Fault, running_hub

DIGITS = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def hub():
    with running_hub() as running:
        yield running


@pytest.fixture
def asked(hub, monkeypatch, tmp_path: Path):
    """`asked(spec, "--fix")`: the command's answer, with a hub that has a model and a data set."""
    commits._commit.cache_clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", hub.address)
    hub.add("org/name", {"config.json": b"{}"})
    hub.add("org/chats", {"train.jsonl": b"{}"}, kind="datasets")

    def answer(spec: dict, *arguments: str):
        job = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": {"name": "tuned"}}
        rest = {"training": {"maxSteps": 1}, "output": {"destination": "pvc://out"}, "workspace": {"claimName": "workspace"}}
        (tmp_path / "job.yaml").write_text(yaml.safe_dump({**job, "spec": {**rest, **spec}}))
        return CliRunner().invoke(app, ["validate", str(tmp_path / "job.yaml"), *arguments])

    return answer


MODEL, CHATS = "hf://org/name", "hf://datasets/org/chats"


@pytest.mark.parametrize(
    "spec",
    [
        {"model": {"source": MODEL}, "data": {"source": CHATS}},
        {"model": {"source": MODEL, "revision": "main"}, "data": {"source": CHATS, "revision": "main"}},
        {"model": {"source": f"{MODEL}@main"}, "data": {"source": f"{CHATS}@main"}},
        {"model": {"source": "org/name"}, "data": {"source": "https://huggingface.co/datasets/org/chats"}},
    ],
)
def test_names_become_commits(asked, hub, spec):
    model, data = (hub.repositories[kind, name].commit for kind, name in (("models", "org/name"), ("datasets", "org/chats")))
    refused = asked(spec)
    assert refused.exit_code != 0
    assert model in refused.output
    fixed = asked(spec, "--fix")
    assert fixed.exit_code == 0, fixed.output
    written = yaml.safe_load(fixed.stdout)["spec"]
    assert (written["model"], written["data"]) == ({"source": MODEL, "revision": model}, {"source": CHATS, "revision": data})


def test_every_data_set_has_a_commit_of_its_own(asked, hub):
    hub.add("org/more", {"train.jsonl": b"{}"}, kind="datasets")
    datasets = [{"source": CHATS}, {"source": "hf://datasets/org/more", "weight": "2"}, {"source": CHATS, "revision": DIGITS}]
    fixed = asked({"model": {"source": "pvc://models"}, "data": {"datasets": datasets}}, "--fix")
    commit_of = {name: hub.repositories["datasets", name].commit for name in ("org/chats", "org/more")}
    written = yaml.safe_load(fixed.stdout)["spec"]["data"]["datasets"]
    assert [each["revision"] for each in written] == [commit_of["org/chats"], commit_of["org/more"], DIGITS]


def test_a_commit_behind_the_address_is_kept(asked):
    fixed = asked({"model": {"source": f"{MODEL}@{DIGITS}"}, "data": {"source": "pvc://data"}}, "--fix")
    assert yaml.safe_load(fixed.stdout)["spec"]["model"] == {"source": MODEL, "revision": DIGITS}


@pytest.mark.parametrize("why", ["offline", "unknown", "no answer", "nonsense"])
def test_without_an_answer_the_manifest_stays_and_the_way_to_the_commit_is_told(asked, hub, monkeypatch, why):
    source = MODEL if why != "unknown" else "hf://org/nothing"
    if why == "offline":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    elif why == "no answer":
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    elif why == "nonsense":
        hub.fail("/api/models/org/name", Fault(times=9, status=200, body=b"[]"))
    spec = {"model": {"source": source}, "data": {"source": "pvc://data"}}
    done = asked(spec)
    assert (done.exit_code, "git ls-remote" in done.output) == (1, True)
    fixed = asked(spec, "--fix")
    assert (fixed.exit_code, NO_COMMIT in fixed.stdout) == (1, False)


@pytest.mark.parametrize("source", ["hf://datasets/org", "hf://", "hf://org", "hf:///", "hf://datasets/", "hf://a/b/c@d@e"])
def test_malformed_address_is_reported_and_asks_for_no_commit(asked, source):
    answer = asked({"model": {"source": "hf://org/name"}, "data": {"source": source}})
    assert answer.exit_code != 0
    assert not isinstance(answer.exception, ValueError), answer.exception
    assert "spec.data.source" in answer.output

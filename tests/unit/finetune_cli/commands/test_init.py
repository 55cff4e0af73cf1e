"""A manifest made from a few answers: it validates, asks for what is missing, and writes over nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from finetune_cli.app import app
from finetune_cli.checks.validate import validate
from finetune_cli.commands.init import Answers, ask, manifest_text
from finetune_cli.exit_codes import ExitCode, LocalError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PLACES = ["--model", "pvc://models/base", "--data", "pvc://data/train.jsonl"]


def init(*arguments: str):
    return CliRunner().invoke(app, ["init", *arguments])


@pytest.mark.parametrize("devices", [1, 2, 3, 6, 8, 64])
def test_what_is_written_validates_for_any_number_of_devices(devices: int) -> None:
    done = init(*PLACES, "--devices", str(devices), "--nodes", "3")
    report = validate(done.stdout)
    assert (done.exit_code, report.exit_code) == (0, ExitCode.DONE), done.stderr
    assert [verdict.findings for verdict in report.verdicts] == [()]
    spec = yaml.safe_load(done.stdout)["spec"]
    assert spec["parallelism"] == {"nodes": 3, "processesPerNode": devices}
    assert spec["output"]["destination"] == "pvc://models-out/base-tuned"


def test_the_hub_needs_commits_and_all_answers_are_used(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    given = ["--model", "hf://org/Llama-3.1-8B", "--data", "hf://datasets/org/chats", "--revision", COMMIT]
    given += ["--output", "s3://bucket/results", "--workspace", "scratch", "--profile", "h100", "-f", str(file)]
    done = init(*given)
    assert (done.exit_code, "--data-revision: is missing" in done.stderr) == (2, True)
    assert "git ls-remote https://huggingface.co/datasets/org/chats HEAD" in done.stderr
    done = init(*given, "--data-revision", COMMIT, "--output", "somewhere")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "spec.output.destination" in done.stderr
    assert not file.exists()
    done = init(*given, "--data-revision", COMMIT, "--output", "pvc://out/here", "--name", "mine")
    assert (done.exit_code, done.stdout) == (0, "")
    document = yaml.safe_load(file.read_text())
    assert document["metadata"] == {"name": "mine"}
    assert document["spec"]["model"] == {"source": "hf://org/Llama-3.1-8B", "revision": COMMIT}
    assert document["spec"]["data"] == {"source": "hf://datasets/org/chats", "revision": COMMIT}
    assert (document["spec"]["profile"], document["spec"]["workspace"]) == ("h100", {"claimName": "scratch"})
    assert document["spec"]["output"] == {"destination": "pvc://out/here"}
    done = init(*PLACES, "-f", str(file))
    assert (done.exit_code, "exists already" in done.stderr) == (2, True)
    done = init(*PLACES, "-f", str(tmp_path / "no" / "job.yaml"))
    assert (done.exit_code, "cannot be written" in done.stderr) == (2, True)


def test_without_a_terminal_what_is_missing_is_named() -> None:
    with pytest.raises(LocalError, match="--model: is missing"):
        ask(Answers(None, None), is_terminal=False)
    with pytest.raises(LocalError, match="--data: is missing"):
        ask(Answers("pvc://m", None), is_terminal=False)
    assert ask(Answers("pvc://m", "pvc://d"), is_terminal=False).devices == 1


def test_on_a_terminal_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    said = iter(["hf://org/name", "pvc://data/x.jsonl", COMMIT, 4])

    def answer(question: str, **_: object) -> object:
        asked.append(question.split(" (", maxsplit=1)[0])
        return next(said)

    monkeypatch.setattr(typer, "prompt", answer)
    answers = ask(Answers(None, None), is_terminal=True)
    assert (answers.model, answers.data, answers.revision, answers.devices) == ("hf://org/name", "pvc://data/x.jsonl", COMMIT, 4)
    assert asked == ["Base model", "Records to train on", "Commit of hf://org/name, 40 digits", "GPUs of one node, or CPU ranks"]
    assert manifest_text(answers)[1].exit_code is ExitCode.DONE


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("pvc://models", "models-tuned"),
        ("hf://o/A_b.C", "a-b-c-tuned"),
        ("hf://o/___", "model-tuned"),
        ("x/" + "y" * 90, "y" * 57 + "-tuned"),
    ],
)
def test_a_name_is_made_from_the_model(model: str, name: str) -> None:
    text, _ = manifest_text(Answers(model, "pvc://d"))
    assert yaml.safe_load(text)["metadata"]["name"] == name

"""A manifest made from a few answers: it validates, asks for what is missing, and writes over nothing."""

from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from finetune_cli.app import app
from finetune_cli.change_verbs import RecordFormat
from finetune_cli.checks.validate import validate
from finetune_cli.commands.data import FirstRecords
from finetune_cli.commands.init import HEAD, Answers, ask, manifest_text, usual_format
from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_job.api.inputs import DataFormat
from tests.support.cases import table
from tests.unit.finetune_trainer.data.record_files import write

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
    assert (done.exit_code, "--data-revision is missing" in done.stderr) == (2, True)
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
    with pytest.raises(LocalError, match="--model is missing"):
        ask(Answers(None, None), is_terminal=False)
    with pytest.raises(LocalError, match="--data is missing"):
        ask(Answers("pvc://m", None), is_terminal=False)
    assert ask(Answers("pvc://m", "pvc://d"), is_terminal=False).devices == 1


def test_on_a_terminal_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    said = iter(["hf://org/name", "pvc://data/x.jsonl", COMMIT, 4, DataFormat.CHAT])

    def answer(question: str, **_: object) -> object:
        asked.append(question.split(" (", maxsplit=1)[0])
        return next(said)

    monkeypatch.setattr(typer, "prompt", answer)
    answers = ask(Answers(None, None), is_terminal=True)
    assert (answers.model, answers.data, answers.revision, answers.devices) == ("hf://org/name", "pvc://data/x.jsonl", COMMIT, 4)
    assert asked == [
        "Base model",
        "Records to train on",
        "Commit of hf://org/name, 40 digits",
        "GPUs of one node, or CPU ranks",
        "Format of the records",
    ]
    text, report = manifest_text(answers)
    assert (report.exit_code, yaml.safe_load(text)["spec"]["data"]["format"]) == (ExitCode.DONE, "Chat")


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


PAIR = {"prompt": "q", "completion": "a"}
CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


@pytest.mark.parametrize(
    ("record", "given", "written", "told"), table(__file__, "test_a_manifest_is_made_for_the_records_that_are_here")
)
@pytest.mark.parametrize("place", ["default", "--claims", "--claim"])
def test_a_manifest_is_made_for_the_records_that_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, record: dict, given: list[str], written: dict, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    claims = tmp_path / ("runs/claims" if place == "default" else "here")
    (claims / "data").mkdir(parents=True)
    write(claims / "data/train.jsonl", [record])
    where = {"default": [], "--claims": ["--claims", "here"], "--claim": ["--claim", "data=here/data"]}[place]
    done = init(*PLACES, *given, *where, "-f", "i.yaml")
    assert done.exit_code == 0, done.stderr
    absent = {"default": "", "--claims": "here/models", "--claim": "runs/claims/models"}[place]
    lines = done.stderr.splitlines(keepends=True)
    assert "".join(line for line in lines if line.startswith("the first records")) == told
    assert any("claim models" in line and absent in line for line in lines) == bool(absent)
    assert "the records are not" not in done.stderr
    assert lines[-1].startswith(f"i.yaml is written; next: `{' '.join(['finetune run i.yaml', *where])}` on this machine")
    assert yaml.safe_load((tmp_path / "i.yaml").read_text())["spec"]["data"] == {"source": "pvc://data/train.jsonl", **written}
    assert (tmp_path / "i.yaml").read_text().startswith(HEAD)
    judged = CliRunner().invoke(app, ["validate", "-f", "i.yaml", *where])
    assert (judged.exit_code, "data-record" in judged.output) == (0, False), judged.output


def test_records_that_no_manifest_puts_right_are_told_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/claims/data").mkdir(parents=True)
    write(tmp_path / "runs/claims/data/train.jsonl", [{"prompt": "q", "chosen": "a", "rejected": "b"}])
    done = init(*PLACES, "-f", "i.yaml")
    assert (done.exit_code, (tmp_path / "i.yaml").exists()) == (1, False)
    assert "error: data-preference-pairs" in done.stderr


@pytest.mark.parametrize("places", [PLACES, [*PLACES[:3], "s3://bucket/data"]])
def test_of_records_that_are_not_here_the_format_is_told_or_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/claims/data").mkdir(parents=True)
    done = init(*places)
    assert (done.exit_code, "format" in yaml.safe_load(done.stdout)["spec"]["data"]) == (0, False)
    assert done.stderr == (
        "the records are not on this machine and are assumed to be PromptCompletion; give --format if they are not, or "
        "--claims DIR if they are here\n"
    )
    done = init(*places, "--format", "Chat")
    assert (done.exit_code, yaml.safe_load(done.stdout)["spec"]["data"]["format"], done.stderr) == (0, "Chat", "")


def test_formats_are_those_of_the_manifest() -> None:
    assert [each.value for each in RecordFormat] == [each.value for each in DataFormat]


def test_each_answer_is_checked_when_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.jsonl").touch()
    records = FirstRecords(tmp_path, {}, is_given=False)
    typed = [
        "base",
        "hf://datasets/o/n",
        "hf://o/n",
        "pvc://data/trian.jsonl",
        "pvc://data/train.jsonl",
        "main",
        COMMIT,
        "0",
        "2",
    ]
    with CliRunner().isolation(input="\n".join(typed)) as (_, errors, *_):
        answers = ask(Answers(None, None), records, is_terminal=True)
        told = errors.getvalue().decode().split("Error: ")[1:]
    assert (answers.model, answers.revision, answers.data) == ("hf://o/n", COMMIT, "pvc://data/train.jsonl")
    assert (answers.devices, answers.format) == (2, None)
    for said, words in zip(told, ["pvc://", "names a data set", "trian.jsonl does not exist", "40", "from 1 to 64"], strict=True):
        assert words in said


@pytest.mark.parametrize(
    ("record", "template", "given", "written"),
    [
        (
            {"prompt": "q", "completion": "a"},
            True,
            [],
            {"format": "Chat", "mapping": {"prompt": "prompt", "completion": "completion"}},
        ),
        ({"instruction": "q", "output": "a"}, True, [], {"format": "Chat", "mapping": {"preset": "Alpaca"}}),
        (PAIR, False, [], {}),
        (PAIR, True, ["--format", "PromptCompletion"], {"format": "PromptCompletion"}),
        (CHAT, True, [], {"format": "Chat"}),
        ({"text": "a"}, True, [], {"format": "Text"}),
    ],
)
@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
def test_records_of_pairs_are_chats_for_a_model_with_a_chat_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, record: dict, template: bool, given: list[str], written: dict
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/claims/data").mkdir(parents=True)
    write(tmp_path / "runs/claims/data/train.jsonl", [record])
    (tmp_path / "runs/claims/models/base").mkdir(parents=True)
    if template:
        (tmp_path / "runs/claims/models/base" / file).write_text('{"chat_template": "{{ messages }}"}')
    done = init(*PLACES, *given)
    assert yaml.safe_load(done.stdout)["spec"]["data"] == {"source": "pvc://data/train.jsonl", **written}, done.stderr
    assert ("the model has a chat template" in done.stderr) == ("mapping" in written)


def test_records_that_are_elsewhere_are_taken_for_chats_if_the_model_has_a_template(tmp_path: Path) -> None:
    (tmp_path / "models/base").mkdir(parents=True)
    records = FirstRecords(tmp_path, {}, is_given=False)
    answers = Answers("pvc://models/base", "s3://bucket/data")
    assert usual_format(answers, records) is DataFormat.PROMPT_COMPLETION
    (tmp_path / "models/base/chat_template.jinja").touch()
    assert usual_format(answers, records) is DataFormat.CHAT

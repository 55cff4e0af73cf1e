"""A newcomer has the pages only: data sets as people have them, the manifest of docs/tutorial/getting-started.md, and what
the product prints. Each data set is prepared, or refused with a fix that works as it is written.

The first answer to the slowest forms comes from a process that may not import torch, and is timed. Training is one step of one
rank of a tiny model.
"""

import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import yaml
from transformers import AutoTokenizer
from typer.testing import CliRunner

from finetune_cli.app import app
from finetune_job.finding import FieldChange
from finetune_job.rules.rule import with_changes
from finetune_trainer.data.prepare import prepare
from tests.support.documented import ROOT, blocks_of
from tests.support.forked_ranks import run_gang
from tests.support.processor import FIRST_ANSWER_SECONDS, run_timed, slowness
from tests.support.tiny_model import run_context, write_model_report, write_tiny_llama
from tests.unit.finetune_cli.manifests import Quoted
from tests.unit.finetune_trainer.data.record_files import write
from tests.unit.finetune_trainer.data.test_forms_of_records import by_words
from tests.unit.finetune_trainer.data.tokenizers_by_hand import byte_tokenizer

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "q"}]}, TURNS[1]]
Source = Callable[[Path], None]


def file(name: str, *records: Mapping[str, Any]) -> Source:
    return lambda directory: write(directory / name, [dict(record) for record in records]) and None


def saved_to_disk(directory: Path) -> None:
    train = datasets.Dataset.from_list([{"text": "one"}, {"text": "two"}])
    datasets.DatasetDict({"train": train, "test": datasets.Dataset.from_list([{"text": "held"}])}).save_to_disk(str(directory))


def hub_folder(directory: Path) -> None:
    (directory / "data").mkdir()
    for name in ("train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001"):
        write(directory / "data" / f"{name}.parquet", [{"messages": [*TURNS[:1], {"role": "assistant", "content": name}]}])
    (directory / "README.md").write_text("---\n---\n")


def text(directory: Path) -> None:
    (directory / "notes.txt").write_text("One paragraph\nof two lines.\n\nAnother.\n")


DATA: dict[str, tuple[Source, Sequence[str], int]] = {
    # What is in the directory, the rules that refuse the page's manifest in this order, and how many records are trained on.
    "chat": (file("a.jsonl", {"messages": TURNS}, {"messages": [*TURNS, *TURNS]}), [], 2),
    "chat with parts": (file("a.jsonl", {"messages": PARTS}), [], 1),
    "turns and an answer as a text": (file("a.jsonl", {"prompt": TURNS[:1], "completion": "a"}), [], 1),
    "ShareGPT": (
        file("a.json", {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}),
        ["data-record-invalid"],
        1,
    ),
    "Alpaca": (
        file("a.json", {"instruction": "do", "input": "", "output": "done"}, {"instruction": "add", "input": "1", "output": "2"}),
        ["data-record-invalid"],
        2,
    ),
    "Alpaca with a rendered text": (
        file("a.json", {"instruction": "q", "input": "", "output": "a", "text": "x"}),
        ["data-record-invalid"],
        1,
    ),
    "CSV with other headers": (file("a.csv", {"question": "q", "answer": "a"}), ["data-record-invalid"], 1),
    "Parquet": (file("a.parquet", {"prompt": "q", "completion": "a"}), ["data-record-invalid"], 1),
    "arrow": (saved_to_disk, ["data-record-invalid"], 2),
    "text": (text, ["data-record-invalid"], 2),
    "Hub folder with splits": (hub_folder, [], 2),
    "preference pairs": (file("a.jsonl", {"prompt": "q", "chosen": "good", "rejected": "bad"}), ["data-preference-pairs"], 1),
}


SLOWEST = ("Parquet", "arrow", "Hub folder with splits")
"""What takes a library to read."""
TRAINED = ("chat", "Alpaca", "arrow")
"""A rank reads what was prepared, whatever form it had: some are trained on, too."""
BY_DAY = ("chat", "ShareGPT", "Alpaca", "CSV with other headers", "Parquet", "preference pairs")
"""The other forms have their tests in finetune_trainer/data/test_forms_of_records.py by day."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base") / "llama"
    write_tiny_llama(directory, torch.float32, vocab_size=258, eos_token_id=257, pad_token_id=257)
    byte_tokenizer(["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>", chat_template=TEMPLATE).save_pretrained(directory)
    return directory


@pytest.fixture
def claims(model: Path, tmp_path: Path) -> Path:
    """As the page's manifest names them."""
    shutil.copytree(model, tmp_path / "claims/models/Llama-3.1-8B-Instruct")
    (tmp_path / "claims/data/mine").mkdir(parents=True)
    return tmp_path / "claims"


def manifest_of_the_page() -> dict[str, Any]:
    (block,) = blocks_of(ROOT / "docs/tutorial/getting-started.md", section="The manifest")
    document: dict[str, Any] = yaml.safe_load(re.split(r"EOF'?\n", block.text)[1])
    document["spec"]["data"]["source"] = "pvc://data/mine"
    return document


def first_answer(document: Mapping[str, Any], claims: Path, allowed: float) -> tuple[str, float, int]:
    """What `finetune validate` prints, its seconds of processor time, and its exit code; torch ends it."""
    (claims.parent / "job.yaml").write_text(yaml.dump(document, Dumper=Quoted))
    command = [sys.executable, "-m", "finetune_cli", "validate", "-f", str(claims.parent / "job.yaml"), "--claims", str(claims)]
    done, seconds = run_timed(command, cwd=ROOT, without=("torch",), traps=claims.parent / "traps", enough=allowed)
    return done.stdout, seconds, done.returncode


def next_answer(document: Mapping[str, Any]) -> str:
    """The same in this process."""
    result = CliRunner().invoke(app, ["validate", "-f", "-", "--claims", "claims"], input=yaml.dump(document, Dumper=Quoted))
    assert result.exit_code in (0, 1), result.output
    return result.output


def errors(said: str) -> list[tuple[str, str]]:
    """Rule and fix of each, as printed."""
    found = re.findall(r"^ *error: (\S+)\n.*?^ *fix: +(.*?)(?=\n *\n|\n *(?:error|warning): |\Z)", said, re.MULTILINE | re.DOTALL)
    return [(rule, " ".join(fix.split())) for rule, fix in found]


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in BY_DAY else pytest.mark.nightly) for name in DATA])
def test_a_data_set_is_trained_or_refused_with_a_fix_that_works(
    name: str, claims: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make, expected, records = DATA[name]
    make(claims / "data/mine")
    document = manifest_of_the_page()
    monkeypatch.chdir(claims.parent)
    if name in SLOWEST:
        factor = slowness()
        said, seconds, code = first_answer(document, claims, FIRST_ANSWER_SECONDS * factor)
        with capsys.disabled():
            print(f"\n{name}: first answer in {seconds:.2f} s of processor time, at {factor:.1f} times that of a usual machine")
        assert code == (1 if expected else 0), said
        assert seconds < FIRST_ANSWER_SECONDS * factor
    else:
        said = next_answer(document)
    refused: list[str] = []
    while found := errors(said):
        rule, fix = found[0]
        refused.append(rule)
        assert len(refused) < 4, said
        # The first of several ways; rules name fields without `spec.`.
        changes = by_words(fix.partition(", or name ")[0])
        document = with_changes(
            document, [FieldChange(field=f"spec.{path.removeprefix('spec.')}", value=value) for path, value in changes.items()]
        )
        said = next_answer(document)
    assert refused == list(expected)
    assert "accepted" in said
    assert prepared_records(document["spec"], claims, trains=name in TRAINED) == records


def prepared_records(spec: dict[str, Any], claims: Path, *, trains: bool) -> int:
    """Prepare the records, and train one step of one rank, which has to end well."""
    short = {"maxSteps": 1, "globalBatchSize": 1, "microBatchSize": 1, "activationCheckpointing": "None"}
    (claims / "workspace").mkdir()
    context = run_context(claims, spec | {"training": short, "data": spec["data"] | {"maxSequenceLength": 64}})
    tokenizer = AutoTokenizer.from_pretrained(context.base_model)
    prepared = context.workspace.prepared
    shutil.rmtree(prepared)
    with prepare(context.plan.data, claims, context.base_model, tokenizer, prepared, num_workers=0) as preparation:
        assert [finding for finding in preparation.findings if finding.severity == "error"] == []
        preparation.publish()
    if trains:
        write_model_report(context, reshard_after_forward=True)
        assert run_gang(context) == [0]
        assert json.loads((context.workspace.adapter / "adapter_config.json").read_text())["r"] == 16
    return preparation.splits["train"].num_records


def test_what_the_page_on_training_says_of_forms_is_accepted_at_once(claims: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest column of its table, for the data sets that it names."""
    monkeypatch.chdir(claims.parent)
    page = (ROOT / "docs/how-to/training.md").read_text().partition("### Records with other names")[2].partition("###")[0]
    rows = [re.split(r" \| ", line.strip("| ")) for line in page.splitlines() if line.startswith("| ")][1:]
    for form, name in (("Alpaca", "Alpaca"), ("ShareGPT", "ShareGPT"), ("CSV", "CSV with other headers")):
        (told,) = [said for first, said in rows if first.startswith(form)]
        parts = re.findall(r"`((?:mapping|format): [^`]+)`", told.partition(";")[0])
        for path in (claims / "data/mine").iterdir():
            path.unlink()
        DATA[name][0](claims / "data/mine")
        document = manifest_of_the_page()
        del document["spec"]["data"]["format"]
        for part in parts:
            document["spec"]["data"] |= yaml.safe_load(part)
        assert errors(next_answer(document)) == [], form

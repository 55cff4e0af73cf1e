"""`finetune init`: writes a valid manifest from a few answers."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from finetune_cli.checks.fix import fix
from finetune_cli.checks.validate import Report, validate_files
from finetune_cli.commands.data import FirstRecords
from finetune_cli.documents import document_text
from finetune_cli.exit_codes import LocalError
from finetune_job.api.base import ClaimPath, HubPath, parse_source
from finetune_job.api.inputs import DataFormat, DataSpec
from finetune_job.api.training import TrainingSpec
from finetune_job.names import API_VERSION, JOB_KIND, MAX_JOB_NAME
from finetune_job.rules.rule import changes_text
from finetune_job.rules.sources import commit_command

_BATCH = TrainingSpec().global_batch_size
_QUESTIONS = {
    "model": ("Base model (hf://ORG/NAME, s3://BUCKET/PREFIX or pvc://CLAIM/PATH)", "--model"),
    "data": ("Records to train on (hf://datasets/ORG/NAME, s3://..., or pvc://CLAIM/FILE)", "--data"),
}
_COMMIT = "Commit of {}, 40 digits (`{}` prints it)"
_FORMAT = f"Format of the records ({', '.join(DataFormat)})"
_NAME = "the manifest"
HEAD = """\
# A FineTuneJob. Every field left out has a default: `finetune explain spec.training` lists fields, and `finetune validate` says
# what was chosen for them. The claims named here must exist; on this machine they are directories below runs/claims.
"""


@dataclass(frozen=True)
class Answers:
    """Answers from which a manifest is made; None: not given."""

    model: str | None
    data: str | None
    revision: str | None = None
    data_revision: str | None = None
    devices: int | None = None
    nodes: int = 1
    destination: str = "pvc://models-out"
    workspace: str = "workspace"
    profile: str | None = None
    name: str | None = None
    format: str | None = None


def ask(given: Answers, records: FirstRecords | None = None, *, is_terminal: bool) -> Answers:
    """Ask for missing answers. Raises LocalError if one is required and there is no terminal."""
    answers = given
    for field, (question, option) in _QUESTIONS.items():
        if getattr(answers, field) is None:
            asked: dict[str, Any] = {field: _asked(question, option, is_terminal=is_terminal)}
            answers = replace(answers, **asked)
    for source, field, option in (("model", "revision", "--revision"), ("data", "data_revision", "--data-revision")):
        address = getattr(answers, source)
        try:
            place = parse_source(address)
        except ValueError:
            continue  # validation refuses it
        if isinstance(place, HubPath) and getattr(answers, field) is None:
            asked = {field: _asked(_COMMIT.format(address, commit_command(place)), option, is_terminal=is_terminal)}
            answers = replace(answers, **asked)
    if answers.devices is None:
        devices = typer.prompt("GPUs of one node, or CPU ranks", default=1, type=int, err=True) if is_terminal else 1
        answers = replace(answers, devices=devices)
    if answers.format is None and is_terminal and unseen(answers, records):
        usual = DataSpec().format
        answers = replace(answers, format=typer.prompt(_FORMAT, default=usual, type=DataFormat, err=True).value)
    return answers


def unseen(answers: Answers, records: FirstRecords | None) -> bool:
    """Whether the training data is not on this machine."""
    try:
        place = parse_source(answers.data or "")
    except ValueError:
        return False
    if records is None or not isinstance(place, ClaimPath):
        return True
    return not (records.claim_paths.get(place.claim, records.claims / place.claim) / place.path).exists()


def _asked(question: str, option: str, *, is_terminal: bool) -> str:
    if not is_terminal:
        raise LocalError(f"{option}: is missing ({question})")
    return str(typer.prompt(question, err=True)).strip()


def manifest_text(answers: Answers) -> tuple[str, Report]:
    """Write the manifest, and judge it by the rules."""
    last = (answers.model or "").rstrip("/").rpartition("/")[2].lower()
    stem = re.sub(r"[^a-z0-9]+", "-", last).strip("-")[: MAX_JOB_NAME - len("-tuned")].rstrip("-")
    name = answers.name or f"{stem or 'model'}-tuned"
    data: dict[str, Any] = {"source": answers.data, **({"format": answers.format} if answers.format else {})}
    model: dict[str, Any] = {"source": answers.model}
    for place, revision in ((model, answers.revision), (data, answers.data_revision)):
        if revision:
            place["revision"] = revision
    scheme, _, rest = answers.destination.partition("://")
    is_whole_claim = scheme == "pvc" and "/" not in rest.rstrip("/")
    ranks = answers.nodes * (answers.devices or 1)
    batch = -(-_BATCH // ranks) * ranks
    spec: dict[str, Any] = {
        **({"profile": answers.profile} if answers.profile else {}),
        "model": model,
        "data": data,
        "method": {"type": "LoRA"},
        "training": {"epochs": 1, **({} if batch == _BATCH else {"globalBatchSize": batch})},
        "parallelism": {"nodes": answers.nodes, "processesPerNode": answers.devices or 1},
        "output": {"destination": f"{answers.destination.rstrip('/')}/{name}" if is_whole_claim else answers.destination},
        "workspace": {"claimName": answers.workspace},
    }
    document = {"apiVersion": API_VERSION, "kind": JOB_KIND, "metadata": {"name": name}, "spec": spec}
    text = HEAD + document_text(document)
    return text, validate_files([(_NAME, text)], None)


def made_for(text: str, records: FirstRecords) -> tuple[str, Report, list[str]]:
    """Adapt an accepted manifest to the first records. Raises LocalError.

    Return the manifest, the report on it, and messages about what was changed or not looked at.
    """
    (fixed,) = fix([(_NAME, text)], records=records.findings)
    messages = [f"the first records need {changes_text(finding.changes)}" for _, finding in fixed.made]
    return fixed.text, records.judged(validate_files([(_NAME, fixed.text)]), messages.append), messages


def write_new(file: Path, text: str) -> None:
    """Write a new file. Raises LocalError if it exists or cannot be written."""
    try:
        with file.open("x") as opened:
            opened.write(text)
    except FileExistsError as error:
        raise LocalError(f"{file}: exists already; name another file, or remove it") from error
    except OSError as error:
        raise LocalError(f"{file}: cannot be written ({error.strerror}); name another file") from error

"""`finetune init`: writes a valid manifest from a few answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from finetune_cli.checks.fix import fix
from finetune_cli.checks.validate import Report, validate_files
from finetune_cli.commands.data import FirstRecords
from finetune_cli.documents import document_text, read_documents
from finetune_cli.edit_yaml import edit_document
from finetune_cli.exit_codes import LocalError
from finetune_job.api.base import BucketPath, ClaimPath, HubPath, parse_source
from finetune_job.api.inputs import DataFormat, DataSpec
from finetune_job.names import API_VERSION, JOB_KIND, MAX_JOB_NAME
from finetune_job.rules.rule import changes_text
from finetune_job.rules.sources import commit_command

_QUESTIONS = {
    "model": ("Base model (hf://ORG/NAME, s3://BUCKET/PREFIX or pvc://CLAIM/PATH)", "--model", "spec.model.source"),
    "data": ("Records to train on (hf://datasets/ORG/NAME, s3://..., or pvc://CLAIM/FILE)", "--data", "spec.data.source"),
    "revision": ("Commit of {}, 40 digits (`{}` prints it)", "--revision", "spec.model.revision"),
    "data_revision": ("Commit of {}, 40 digits (`{}` prints it)", "--data-revision", "spec.data.revision"),
}
"""Maps each answer to its question, its option, and the field that it sets."""
_STAND_INS = {"model": "pvc://models/base", "data": "pvc://data/train.jsonl"}
"""Stand-ins for answers that are not given yet, so that the first answer can already be checked."""
MOST_DEVICES = 64
"""Maximum of spec.parallelism.processesPerNode."""
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
    for field, (question, option, _) in _QUESTIONS.items():
        if getattr(answers, field) is not None:
            continue
        if field.endswith("revision"):
            source = answers.data if field == "data_revision" else answers.model
            place = _place(source)
            if not isinstance(place, HubPath):
                continue
            question = question.format(source, commit_command(place))
        if not is_terminal:
            raise LocalError(f"{option} is missing ({question})")
        asked: dict[str, Any] = {field: typer.prompt(question, err=True, value_proc=_checks(answers, field, records))}
        answers = replace(answers, **asked)
    if answers.devices is None:
        words = "GPUs of one node, or CPU ranks"
        devices = typer.prompt(words, default=1, value_proc=_device_count, err=True) if is_terminal else 1
        answers = replace(answers, devices=devices)
    if answers.format is None and is_terminal and unseen(answers, records):
        usual = usual_format(answers, records)
        answers = replace(answers, format=typer.prompt(_FORMAT, default=usual, type=DataFormat, err=True).value)
    return answers


def unseen(answers: Answers, records: FirstRecords | None) -> bool:
    """Whether the training data is not on this machine."""
    place = _local(answers.data, records)
    return place is None or not place.exists()


def usual_format(answers: Answers, records: FirstRecords | None) -> DataFormat:
    """Return the format to assume for records that are not here: chat, if the model is here and has a chat template."""
    model = _local(answers.model, records)
    if model is not None and (model / "chat_template.jinja").is_file():
        return DataFormat.CHAT
    with suppress(OSError, ValueError):
        if model is not None and "chat_template" in json.loads((model / "tokenizer_config.json").read_text()):
            return DataFormat.CHAT
    return DataSpec().format


def _place(source: str | None) -> ClaimPath | HubPath | BucketPath | None:
    """Return the parsed address; None if it cannot be parsed, which validation reports."""
    with suppress(ValueError):
        return parse_source(source or "")
    return None


def _local(source: str | None, records: FirstRecords | None) -> Path | None:
    """Return the path on this machine of a source on a claim; None for other sources."""
    place = _place(source)
    if records is None or not isinstance(place, ClaimPath):
        return None
    return records.claim_paths.get(place.claim, records.claims / place.claim) / place.path


def _checks(answers: Answers, field: str, records: FirstRecords | None) -> Callable[[str], str]:
    """Return a function that checks an answer by the rules; it raises BadParameter so that the question is asked again."""

    def check(text: str) -> str:
        text, given = text.strip(), {name: value for name in _QUESTIONS if (value := getattr(answers, name)) is not None}
        _, report = manifest_text(replace(answers, **{**_STAND_INS, **given, field: text}))
        for finding in (finding for verdict in report.verdicts for finding in verdict.findings):
            if finding.severity == "error" and finding.field == _QUESTIONS[field][2]:
                raise typer.BadParameter(f"{finding.message}; {finding.fix}")
        place = _local(text, records)
        if place is not None and place.parent.is_dir() and not place.exists() and "/" in text.removeprefix("pvc://"):
            raise typer.BadParameter(f"{place} does not exist")
        return text

    return check


def _device_count(text: Any) -> int:
    if not str(text).strip().isdecimal() or not 1 <= int(text) <= MOST_DEVICES:
        raise typer.BadParameter(f"{text} is not a number from 1 to {MOST_DEVICES}")
    return int(text)


def manifest_text(answers: Answers) -> tuple[str, Report]:
    """Return the text of the manifest, and the rules' report on it."""
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
    spec: dict[str, Any] = {
        **({"profile": answers.profile} if answers.profile else {}),
        "model": model,
        "data": data,
        "method": {"type": "LoRA"},
        "training": {"epochs": 1},
        "parallelism": {"nodes": answers.nodes, "processesPerNode": answers.devices or 1},
        "output": {"destination": f"{answers.destination.rstrip('/')}/{name}" if is_whole_claim else answers.destination},
        "workspace": {"claimName": answers.workspace},
    }
    document = {"apiVersion": API_VERSION, "kind": JOB_KIND, "metadata": {"name": name}, "spec": spec}
    text = HEAD + document_text(document)
    return text, validate_files([(_NAME, text)], None)


def made_for(text: str, answers: Answers, records: FirstRecords) -> tuple[str, Report, list[str]]:
    """Adapt an accepted manifest to the first records. Raises LocalError.

    Return the manifest, the report on it, and messages about what was changed or not checked.
    """
    (fixed,) = fix([(_NAME, text)], records=records.findings)
    messages = [f"the first records need {changes_text(finding.changes)}" for _, finding in fixed.made]
    text, wanted = fixed.text, read_documents(fixed.text)[0].content
    data = wanted["spec"]["data"]
    is_seen, is_pair = not unseen(answers, records), data.get("format", DataSpec().format) == DataFormat.PROMPT_COMPLETION
    if answers.format is None and is_seen and is_pair and usual_format(answers, records) is DataFormat.CHAT:
        pair = {"prompt": "prompt", "completion": "completion"}
        data |= {"format": DataFormat.CHAT.value, "mapping": data.get("mapping", pair)}
        text = edit_document(text, 1, wanted)
        messages.append("the model has a chat template, so each prompt is asked by the user and each completion is the answer")
    return text, records.judged(validate_files([(_NAME, text)]), messages.append), messages


def write_new(file: Path, text: str) -> None:
    """Write a new file. Raises LocalError if it exists or cannot be written."""
    try:
        with file.open("x") as opened:
            opened.write(text)
    except FileExistsError as error:
        raise LocalError(f"{file} exists already; name another file, or remove it") from error
    except OSError as error:
        raise LocalError(f"{file} cannot be written ({error.strerror}); name another file") from error

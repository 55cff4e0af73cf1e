"""Makes manifests from jobs: the same job again, or the job with changes."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from finetune_cli.exit_codes import LocalError
from finetune_job.fields import all_fields
from finetune_job.finding import FieldChange
from finetune_job.layout import WorkspaceLayout, checkpoint_name
from finetune_job.names import API_VERSION, JOB_KIND, MAX_JOB_NAME, workspace_claim_name, workspace_folder
from finetune_job.rules.rule import with_changes

_NUMBERED = re.compile(r"(?P<stem>.+?)-(?P<number>[1-9]\d{0,5})")
_OF_ONE_TRY = ("suspend", "cancel", "retry")
"""Fields of spec.run that are not copied from one job to another."""


def next_name(name: str, taken: Collection[str]) -> str:
    """Return the first free name: `tune-2` after `tune`, `tune-3` after `tune-2`; it has at most `MAX_JOB_NAME` characters."""
    match = _NUMBERED.fullmatch(name)
    stem, number = (match["stem"], int(match["number"])) if match is not None else (name, 1)
    while True:
        number += 1
        candidate = f"{stem[: MAX_JOB_NAME - len(str(number)) - 1].rstrip('-.')}-{number}"
        if candidate not in taken:
            return candidate


def copy_of(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a new job with the same spec, but neither suspended nor cancelled nor retried."""
    spec = copy.deepcopy(dict(document["spec"]))
    run = {key: value for key, value in (spec.get("run") or {}).items() if key not in _OF_ONE_TRY}
    spec.pop("run", None)
    if run:
        spec["run"] = run
    metadata = document.get("metadata")
    labels = {"labels": dict(metadata["labels"])} if isinstance(metadata, Mapping) and metadata.get("labels") else {}
    return {"apiVersion": API_VERSION, "kind": JOB_KIND, "metadata": {"name": name, **labels}, "spec": spec}


def fork_of(document: Mapping[str, Any], name: str, changes: Iterable[FieldChange]) -> dict[str, Any]:
    """Copy a job with changes. The results of the copy go to a new place, unless a change names the place."""
    changes = list(changes)
    made = copy_of(document, name)
    output = made["spec"].get("output")
    is_set = any(change.field in ("spec.output", "spec.output.destination") for change in changes)
    if not is_set and isinstance(output, dict) and isinstance(output.get("destination"), str):
        output["destination"] = other_destination(output["destination"], name)
    return with_changes(made, changes)


def start_changes(document: Mapping[str, Any], step: int) -> list[FieldChange]:
    """Return changes that make a job's copy start from the original job's checkpoint at `step`. Raises LocalError."""
    metadata, workspace = document.get("metadata"), document["spec"].get("workspace")
    if not isinstance(metadata, Mapping) or not isinstance(workspace, Mapping):
        raise LocalError("--from: the job has no metadata or no spec.workspace, by which its checkpoints are found")
    name, uid, named = metadata.get("name"), metadata.get("uid"), workspace.get("claimName")
    if not isinstance(name, str) or not isinstance(uid, str):
        raise LocalError("--from: the job has no name or no uid, by which its checkpoints are found")
    folder = WorkspaceLayout(Path(workspace_folder(name, uid)))
    return [
        FieldChange(field="spec.training.startFrom", value=str(folder.checkpoints / checkpoint_name(step))),
        FieldChange(field="spec.workspace.claimName", value=named or workspace_claim_name(name)),
        *(FieldChange(field=f"spec.workspace.{each}", value=None) for each in ("volumeClaimTemplate", "retain") if not named),
    ]


def other_destination(destination: str, name: str) -> str:
    """Return a destination of the same kind for a job of this name: another folder, repository or tag."""
    address = destination.rstrip("/")
    scheme, _, place = address.partition("://")
    if scheme == "oci":
        return f"{address}-{name}" if ":" in place.rpartition("/")[2] else f"{address}:{name}"
    if scheme == "hf":
        return f"{address}-{name}"
    # If the destination is a whole claim or bucket, the name becomes a folder in it.
    head, slash, _ = place.rpartition("/")
    return f"{scheme}://{head}/{name}" if slash else f"{address}/{name}"


def parse_change(text: str) -> FieldChange:
    """Parse a change of a job such as `training.maxSteps=20`; an empty value removes the field. Raises LocalError."""
    path, sign, value = text.partition("=")
    path = path.strip()
    path = path if path.split(".")[0] in ("spec", "metadata") else f"spec.{path}"
    if not sign:
        raise LocalError(f"--set {text} is not of the form PATH=VALUE; give a field and its value, e.g. training.maxSteps=20")
    field = next((known for known in all_fields() if known.kind == JOB_KIND and known.path == path), None)
    # The API does not list the keys of maps, such as the entries of rankPattern or the labels.
    maps = ["metadata.labels", *(known.path for known in all_fields() if known.kind == JOB_KIND and known.takes_any_key)]
    if field is None and not any(path.startswith(f"{prefix}.") for prefix in maps):
        raise LocalError(f"--set {text}: a FineTuneJob has no field {path}; `finetune explain {path}` names similar fields")
    if not value or (field is not None and field.is_text):
        return FieldChange(field=path, value=value or None)
    if len(value) > 65_536:
        raise LocalError(f"--set {text[:80]}...: the value has more than 65536 characters")
    try:
        return FieldChange(field=path, value=yaml.safe_load(value))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise LocalError(f"--set {text}: the value is not YAML; write it as in a manifest") from error

"""A job of a cluster once more: the manifest that runs its plan again, and what the results of both have in common."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_cli.jobs import documents
from finetune_cli.jobs.next_manifest import fork_of, other_destination
from finetune_cli.jobs.plain import plain
from finetune_cli.jobs.seen import SeenJob
from finetune_job.api.training import GradientReduction
from finetune_job.catalogue.book import audit_finding
from finetune_job.finding import FieldChange, Finding
from finetune_job.layout import OutputLayout
from finetune_job.names import ANNOTATION_REPRODUCES, MAX_JOB_NAME, workspace_claim_name
from finetune_job.plan.run_plan import RECOMPUTATION_FIELD

_LAYOUT = OutputLayout(Path())
ADAPTER, MERGED = str(_LAYOUT.adapter), str(_LAYOUT.merged)
_MANIFESTS = {f"{name}/manifest.json": name for name in (ADAPTER, MERGED)}
RESULT_FILES = (*_MANIFESTS, str(_LAYOUT.provenance))
"""Files of the results that have the digests of adapter and merged model, and the devices that trained them."""
_SUFFIX = "-reproduced"
_CHOSEN_BY_MEMORY = (RECOMPUTATION_FIELD, "spec.training.microBatchSize")
"""Settings that other nodes, with another share of memory, might choose differently."""
_MOST_NAMED = 5


def reproduction_name(name: str) -> str:
    """`tune-reproduced` after `tune`, of at most `MAX_JOB_NAME` characters."""
    return f"{name[: MAX_JOB_NAME - len(_SUFFIX)].rstrip('-.')}{_SUFFIX}"


def reproduction_of(job: SeenJob, name: str, nodes: int | None, folder: str) -> dict[str, Any]:
    """A job of the same spec that publishes nothing: its results go to a folder of this name on a claim.

    nodes: on which it trains; None: as many as the job. Raises LocalError.
    """
    changes = [
        FieldChange(field="spec.output.destination", value=_destination(job, name, folder)),
        FieldChange(field="spec.output.secretRef", value=None),
        # Its report is for nobody, and its samples take as long as those of the first one.
        FieldChange(field="spec.output.sampleAnswers", value=0),
        *_node_changes(job, nodes),
    ]
    document = fork_of(job.document, name, changes)
    document["metadata"]["annotations"] = {ANNOTATION_REPRODUCES: job.uid}
    return document


def reproduces(document: Mapping[str, Any], job: SeenJob) -> bool:
    """Whether a job was made to run this one again."""
    return documents.text(document, "metadata", "annotations", ANNOTATION_REPRODUCES) == job.uid


def _destination(job: SeenJob, name: str, folder: str) -> str:
    written = documents.text(job.spec, "output", "destination")
    if written.startswith("pvc://"):
        return other_destination(written, folder)
    claim = documents.text(job.spec, "workspace", "claimName") or workspace_claim_name(name)
    return f"pvc://{claim}/{folder}"


def _node_changes(job: SeenJob, nodes: int | None) -> list[FieldChange]:
    """Changes that spread the same ranks over so many nodes: sums are taken over the ranks that the job asks for."""
    if nodes is None or nodes == job.num_nodes:
        return []
    if documents.text(job.spec, "training", "reduction") != GradientReduction.ORDERED:
        raise LocalError(
            f"--nodes {nodes}: {job.title} adds up gradients in an order of its own {job.num_nodes} nodes, and on another number "
            "gives other bytes; leave --nodes out, and set spec.training.reduction to Ordered in the next job"
        )
    if job.num_ranks % nodes:
        raise LocalError(
            f"--nodes {nodes}: {job.title} has {job.num_ranks} ranks, which so many nodes cannot share evenly; give a divisor of "
            f"{job.num_ranks}"
        )
    changes = [
        FieldChange(field="spec.parallelism.nodes", value=nodes),
        FieldChange(field="spec.parallelism.processesPerNode", value=job.num_ranks // nodes),
        FieldChange(field="spec.parallelism.elastic", value=None),
    ]
    for choice in [] if job.status.plan is None else job.status.plan.choices:
        if choice.field in _CHOSEN_BY_MEMORY:
            with suppress(ValueError, RecursionError):
                changes.append(FieldChange(field=choice.field, value=json.loads(choice.value)))
    return changes


@dataclass(frozen=True)
class Results:
    """Digests and devices that the results of a job name."""

    files: Mapping[str, str]
    """SHA-256 of each file of the adapter and of the merged model, by its name in the results."""
    devices: frozenset[str]
    """Devices that trained it; empty: they are not known."""


def read_results(job: SeenJob, printed: Iterable[Mapping[str, Any]]) -> Results:
    """Read what a pod printed of RESULT_FILES, whatever is in it. Raises LocalError if that is not what the job left."""
    texts: dict[str, str] = {}
    for each in printed:
        if each.get("cut") is True:
            raise _unusable(job, f"{plain(each.get('file', 'what was read'), 200)} is longer than can be read")
        if isinstance(each.get("line"), str):
            texts[str(each.get("file"))] = f"{texts.get(str(each.get('file')), '')}{each['line']}\n"
    known = {one.name: one.sha256 for one in job.status.artifacts if one.sha256}
    files: dict[str, str] = {}
    for path, name in _MANIFESTS.items():
        if path not in texts:
            continue
        if known.get(name, sha256 := hashlib.sha256(texts[path].encode()).hexdigest()) != sha256:
            raise _unusable(job, f"{path} is {sha256}, and its status names {known[name]}: somebody has changed it")
        files |= {f"{name}/{file}": digest for file, digest in _digests(texts[path]).items()}
    if not files:
        raise _unusable(job, f"there is none of {', '.join(_MANIFESTS)}")
    return Results(files, _devices(texts.get(str(_LAYOUT.provenance), "")))


def _unusable(job: SeenJob, message: str) -> LocalError:
    return LocalError(f"{job.title}: its results cannot be compared: {message}", ExitCode.FAILED)


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _digests(text: str) -> dict[str, str]:
    """Digests by name in a manifest: training has a mapping of files, the merge a list."""
    manifest = _loaded(text)
    listed = [
        *((str(name), entry) for name, entry in documents.part(manifest, "files").items()),
        *((documents.text(entry, "name"), entry) for entry in documents.elements(manifest, "files")),
    ]
    return {name: documents.text(entry, "sha256") for name, entry in listed if name and documents.text(entry, "sha256")}


def _devices(text: str) -> frozenset[str]:
    attempts = documents.elements(_loaded(text), "predicate", "buildDefinition", "internalParameters", "attempts")
    return frozenset(device for each in attempts if (device := documents.text(each, "device")))


def inputs_differ(first: SeenJob, second: SeenJob) -> list[Finding]:
    """Differences in what preflight found, as far as both have reported it."""
    before, now = first.status.plan, second.status.plan
    if before is None or now is None:
        return []
    findings = []
    if before.data_hash and now.data_hash and before.data_hash != now.data_hash:
        findings.append(
            audit_finding(
                "audit-data-differs",
                field="spec.data.source",
                value=now.data_hash,
                message=f"the records give other prepared data than they did, {before.data_hash}: records, tokenizer or the "
                "libraries that prepare them have changed",
            )
        )
    if before.model_digest and now.model_digest and before.model_digest != now.model_digest:
        findings.append(
            audit_finding(
                "audit-base-differs",
                field="spec.model.source",
                value=now.model_digest,
                message=f"the base model is another one than it was, {before.model_digest}",
            )
        )
    if before.trainer_image and now.trainer_image and before.trainer_image != now.trainer_image:
        findings.append(
            audit_finding(
                "audit-not-proven",
                field="trainerImage",
                value=plain(now.trainer_image, 300),
                message=f"the profile names another trainer image than {plain(before.trainer_image, 300)}: bytes may differ for "
                "that reason alone",
                fix="Name the first image in a profile to compare under the same conditions",
            )
        )
    return findings


def results_differ(first: Results, second: Results, note: str) -> list[Finding]:
    """The files that are not the same, the adapter's first. note: what may explain it."""
    findings = []
    for name in (ADAPTER, MERGED):
        names = [each for each in sorted({*first.files, *second.files}) if each.startswith(f"{name}/")]
        different = [plain(each, 200) for each in names if first.files.get(each) != second.files.get(each)]
        if different:
            more = len(different) - _MOST_NAMED
            shown = ", ".join(different[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
            message = f"{len(different)} of {len(names)} files are not what the plan gives: {shown}{note}"
            findings.append(audit_finding("audit-result-differs", field=name, message=message))
    return findings

"""Runs a job of a cluster again: makes the manifest of the second job, and compares the inputs and results of both jobs."""

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
"""Result files that hold the digests of the adapter and the merged model, and name the devices that trained them."""
_SUFFIX = "-reproduced"
_CHOSEN_BY_MEMORY = (RECOMPUTATION_FIELD, "spec.training.microBatchSize")
"""Settings that might be chosen differently on another number of nodes, where each rank's share of memory differs."""
_MOST_NAMED = 5


def reproduction_name(name: str) -> str:
    """Return `tune-reproduced` for `tune`, with at most `MAX_JOB_NAME` characters."""
    return f"{name[: MAX_JOB_NAME - len(_SUFFIX)].rstrip('-.')}{_SUFFIX}"


def reproduction_of(job: SeenJob, name: str, nodes: int | None, folder: str) -> dict[str, Any]:
    """Return a job with the same spec that publishes nothing: its results go to `folder` on a claim.

    nodes: number of nodes of the new job; None: as many as `job` has. Raises LocalError.
    """
    written = documents.text(job.spec, "output", "destination")
    claim = documents.text(job.spec, "workspace", "claimName") or workspace_claim_name(name)
    destination = other_destination(written, folder) if written.startswith("pvc://") else f"pvc://{claim}/{folder}"
    changes = [
        FieldChange(field="spec.output.destination", value=destination),
        FieldChange(field="spec.output.secretRef", value=None),
        # The new job needs no sample answers: nobody reads its report, and sample answers take time.
        FieldChange(field="spec.output.sampleAnswers", value=0),
        *_node_changes(job, nodes),
    ]
    document = fork_of(job.document, name, changes)
    document["metadata"]["annotations"] = {ANNOTATION_REPRODUCES: job.uid}
    return document


def reproduces(document: Mapping[str, Any], job: SeenJob) -> bool:
    """Whether the job in `document` was created to run `job` again."""
    return documents.text(document, "metadata", "annotations", ANNOTATION_REPRODUCES) == job.uid


def _node_changes(job: SeenJob, nodes: int | None) -> list[FieldChange]:
    """Return changes that spread the job's ranks over `nodes`. As gradients are summed over ranks, their number stays."""
    if nodes is None or nodes == job.num_nodes:
        return []
    if documents.text(job.spec, "training", "reduction") != GradientReduction.ORDERED:
        raise LocalError(
            f"--nodes {nodes}: {job.title} adds up gradients in an order that depends on its {job.num_nodes} nodes, and a "
            "different number gives different bytes; leave --nodes out, and set spec.training.reduction to Ordered in a new job"
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
    """The digests of a job's result files, and the devices that trained the adapter."""

    files: Mapping[str, str]
    """SHA-256 of each file of the adapter and of the merged model, by its name in the results."""
    devices: frozenset[str]
    """Devices that trained the adapter; empty: they are not known."""


def read_results(job: SeenJob, printed: Iterable[Mapping[str, Any]]) -> Results:
    """Read RESULT_FILES as a pod printed them; they may hold anything. Raises LocalError if they are not what the job wrote."""
    texts: dict[str, str] = {}
    for each in printed:
        if each.get("cut") is True:
            raise _unusable(job, f"{plain(each.get('file', 'what was read'), 200)} is longer than can be read")
        if isinstance(each.get("line"), str):
            texts[str(each.get("file"))] = f"{texts.get(str(each.get('file')), '')}{each['line']}\n"
    known = {artifact.name: artifact.sha256 for artifact in job.status.artifacts if artifact.sha256}
    files: dict[str, str] = {}
    for path, name in _MANIFESTS.items():
        if path not in texts:
            continue
        if known.get(name, sha256 := hashlib.sha256(texts[path].encode()).hexdigest()) != sha256:
            raise _unusable(job, f"{path} has the SHA-256 {sha256}, but its status names {known[name]}: somebody has changed it")
        manifest = _loaded(texts[path])
        # Training writes a mapping of files, the merge a list.
        listed = [
            *documents.part(manifest, "files").items(),
            *((documents.text(entry, "name"), entry) for entry in documents.elements(manifest, "files")),
        ]
        files |= {f"{name}/{file}": digest for file, entry in listed if file and (digest := documents.text(entry, "sha256"))}
    if not files:
        raise _unusable(job, f"none of these files exists: {', '.join(_MANIFESTS)}")
    provenance = _loaded(texts.get(str(_LAYOUT.provenance), ""))
    attempts = documents.elements(provenance, "predicate", "buildDefinition", "internalParameters", "attempts")
    return Results(files, frozenset(device for attempt in attempts if (device := documents.text(attempt, "device"))))


def _unusable(job: SeenJob, message: str) -> LocalError:
    return LocalError(f"{job.title}: its results cannot be compared: {message}", ExitCode.FAILED)


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def has_error(findings: Iterable[Finding]) -> bool:
    """Whether one of the findings is an error."""
    return any(finding.severity == "error" for finding in findings)


def data_differs(before: str, now: str) -> list[Finding]:
    """Return a finding about changed data if the digests of the prepared data differ, else none."""
    message = (
        f"the prepared data differs from before, when it was {before}: the records, the tokenizer or the libraries that prepare "
        "them have changed"
    )
    same = before == now
    return [] if same else [audit_finding("audit-data-differs", field="spec.data.source", value=now, message=message)]


def inputs_differ(first: SeenJob, second: SeenJob) -> list[Finding]:
    """Return findings on the differences between the preflight reports of two jobs, if both jobs have one."""
    before, now = first.status.plan, second.status.plan
    if before is None or now is None:
        return []
    findings = data_differs(before.data_hash, now.data_hash) if before.data_hash and now.data_hash else []
    if before.model_digest and now.model_digest and before.model_digest != now.model_digest:
        findings.append(
            audit_finding(
                "audit-base-differs",
                field="spec.model.source",
                value=now.model_digest,
                message=f"the base model has changed; its digest was {before.model_digest}",
            )
        )
    if before.trainer_image and now.trainer_image and before.trainer_image != now.trainer_image:
        findings.append(
            audit_finding(
                "audit-not-proven",
                field="trainerImage",
                value=plain(now.trainer_image, 300),
                message=f"the profile names a different trainer image from {plain(before.trainer_image, 300)}: bytes may differ "
                "for that reason alone",
                fix="Name the first image in a profile to compare under the same conditions",
            )
        )
    return findings


def results_differ(first: Results, second: Results, note: str) -> list[Finding]:
    """Return findings on the files that differ, the adapter's first. note: what may explain the difference."""
    findings = []
    for name in (ADAPTER, MERGED):
        names = [each for each in sorted({*first.files, *second.files}) if each.startswith(f"{name}/")]
        different = [plain(each, 200) for each in names if first.files.get(each) != second.files.get(each)]
        if different:
            more = len(different) - _MOST_NAMED
            shown = ", ".join(different[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
            message = f"{len(different)} of {len(names)} files differ from those of the first run: {shown}{note}"
            findings.append(audit_finding("audit-result-differs", field=name, message=message))
    return findings

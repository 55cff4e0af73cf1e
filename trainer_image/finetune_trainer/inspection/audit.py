"""Checks that the parts of a run belong together: plan, records, data, base model, checkpoints, results. Does not import torch.

Only digests are compared. They reveal a later change unless all digests that depend on the changed part were changed too. Such
a change shows only when steps are computed again, as `finetune audit` does with the parts found here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from finetune_job.catalogue.book import audit_finding
from finetune_job.finding import Finding
from finetune_trainer.added_tokens import read_added_tokens
from finetune_trainer.checkpoint.compare import results_difference
from finetune_trainer.checkpoint.manifest import Origin, read_manifest, verify_file
from finetune_trainer.checkpoint.retention import checkpoint_directories
from finetune_trainer.context import RunContext
from finetune_trainer.data import shards
from finetune_trainer.errors import CheckpointError, PlanMismatchError
from finetune_trainer.files import MANIFEST_FILE, file_sha256, read_own, sha256_beneath
from finetune_trainer.inspection.report import ModelReport, read_report
from finetune_trainer.inspection.source_model import source_difference
from finetune_trainer.json_lines import read_lines
from finetune_trainer.weights.errors import MergeError


@dataclass(frozen=True)
class KeptCheckpoint:
    """A checkpoint of the run, all of whose bytes are as they were written."""

    step: int
    world_size: int
    best_step: int | None


@dataclass(frozen=True)
class RunParts:
    """The findings, and the parts of a run that can be computed again and compared."""

    findings: tuple[Finding, ...]
    checkpoints: tuple[KeptCheckpoint, ...]
    """Checkpoints in the order of their steps."""
    exported_step: int | None
    """Step of the trained result on the workspace or at the output; None if there is no result."""
    devices: tuple[str, ...]
    """The devices of the attempts that recorded one."""

    def document(self) -> dict[str, Any]:
        """The parts as JSON."""
        return {**asdict(self), "findings": [finding.model_dump(mode="json") for finding in self.findings]}


def inspect_run(context: RunContext) -> RunParts:
    """Inspect all parts of a run. Reads every byte of its base model, data, checkpoints and results. Raises OSError."""
    report, findings = _report(context)
    data_hash, data_findings = _data(context, report)
    checkpoints, checkpoint_findings = _checkpoints(context, data_hash)
    exported, result_findings = _result(context)
    findings += [*data_findings, *_base(context, report), *checkpoint_findings, *result_findings]
    findings += _provenance(context, data_hash)
    accounts = context.workspace.accounts
    lines = read_lines(read_own(accounts).decode(errors="replace") if accounts.is_file() else "")
    devices = dict.fromkeys(line["device"] for line in lines if isinstance(line.get("device"), str))
    return RunParts(tuple(findings), tuple(checkpoints), exported, tuple(devices))


def not_proven(field: str, value: str, message: str, fix: str) -> Finding:
    """Return a finding that something cannot be checked, which is evidence neither for nor against the run."""
    return audit_finding("audit-not-proven", field=field, value=value, message=message, fix=fix)


def _report(context: RunContext) -> tuple[ModelReport | None, list[Finding]]:
    path = context.workspace.model_report
    try:
        report = read_report(path)
    except (ValueError, PlanMismatchError):
        return None, [_plan_differs(path, "", "is not a report of preflight")]
    if report is not None and report.plan_sha256 != context.plan_sha256:
        return report, [_plan_differs(path, report.plan_sha256, f"belongs to a plan other than {context.plan_sha256}")]
    return report, []


def _plan_differs(path: Path, value: str, message: str) -> Finding:
    return audit_finding("audit-plan-differs", field=path.name, value=value, message=f"{path}: {message}")


def _data(context: RunContext, report: ModelReport | None) -> tuple[str | None, list[Finding]]:
    """Return the prepared data's hash (None if the data has changed), and findings about the data and its source files."""
    prepared = context.workspace.prepared
    try:
        manifest = shards.read_manifest(prepared)
        shards.verify_files(prepared, manifest)
    except shards.PreparedDataError as error:
        return None, [_data_differs("prepared", "", str(error))]
    data_hash, plan = str(manifest["data_hash"]), context.plan.data
    findings = []
    planned = [*plan.train, *([plan.validation] if plan.validation is not None else [])]
    for source, known in zip(planned, manifest.get("inputs", {}).get("sources", []), strict=False):
        place = context.path(source.location)
        for name, sha256 in known["files"]:
            # If the source is a single file, the data manifest holds only the file's suffix, so the source's path is used.
            path = place / name if place.is_dir() else place
            if not path.is_file():
                message = f"{path} is gone, so its records are not compared"
                findings.append(not_proven(source.field, source.source, message, "Restore it"))
            elif file_sha256(path) != sha256:
                findings.append(_data_differs(source.field, source.source, f"{path} no longer holds the prepared records"))
    if report is not None and report.data_hash != data_hash:
        findings.append(_data_differs("prepared", data_hash, f"preflight prepared {report.data_hash}"))
    return data_hash, findings


def _data_differs(field: str, value: str, message: str) -> Finding:
    return audit_finding("audit-data-differs", field=field, value=value, message=message)


def _base(context: RunContext, report: ModelReport | None) -> Iterator[Finding]:
    """Check the base's files, and whether preflight's base with added tokens was made from the base that the job names."""
    field, value = "spec.model.source", context.plan.model.name
    known = {} if report is None else report.model_files
    if not known:
        message = "preflight recorded no digests of the base model's weights, since the job merges nothing"
        fix = "No action needed: recomputing steps shows whether the base was changed"
        yield not_proven(field, value, message, fix)
    for name, sha256 in known.items():
        path = context.base_model / name
        if not path.is_file() or file_sha256(path) != sha256:
            message = f"{path} {'is not what preflight saw' if path.is_file() else 'is missing'}"
            yield audit_finding("audit-base-differs", field=field, value=value, message=message)
    added = read_added_tokens(context.workspace.added_tokens) if context.plan.model.added_tokens else None
    if added is None or not context.base_model.is_dir():
        return
    if not context.source_model.is_dir():
        gone = f"{context.source_model} is gone, so it is not compared with {context.base_model}, which was made from it"
        yield not_proven(field, value, gone, "Restore it")
    elif difference := source_difference(context.source_model, context.base_model, added):
        yield audit_finding("audit-base-differs", field=field, value=value, message=f"{context.base_model} {difference}")


def _checkpoints(context: RunContext, data_hash: str | None) -> tuple[list[KeptCheckpoint], list[Finding]]:
    kept: list[KeptCheckpoint] = []
    findings = []
    if data_hash is None:
        # The data hash that checkpoints should name is unknown, so none can be checked.
        return [], []
    first_values, lora = context.workspace.first_values, context.plan.method.lora
    starts_from_base = lora is not None and lora.starts_from_base and first_values.is_file()
    origin = None
    for directory in reversed(checkpoint_directories(context.workspace.checkpoints)):
        try:
            if origin is None:
                digest = file_sha256(first_values) if starts_from_base else None
                origin = Origin(learning_sha256=context.learning_sha256, data_hash=data_hash, first_values=digest)
            manifest = read_manifest(directory, origin)
            for entry in manifest.files:
                verify_file(directory, entry)
        except (CheckpointError, OSError) as error:
            findings.append(audit_finding("audit-checkpoint-foreign", field=directory.name, message=str(error)))
        else:
            kept.append(KeptCheckpoint(manifest.step, manifest.world_size, manifest.best_step))
    return kept, findings


def _result(context: RunContext) -> tuple[int | None, list[Finding]]:
    published = context.output.adapter if context.plan.method.trains_adapter else context.output.merged
    trained = context.workspace.adapter if context.workspace.adapter.is_dir() else published
    if not trained.is_dir():
        return None, []
    try:
        manifest = json.loads(read_own(trained / MANIFEST_FILE))
        step, files = int(manifest["step"]), manifest["files"]
        changed = [name for name, entry in files.items() if sha256_beneath(trained, name) != entry["sha256"]]
        if manifest["plan_sha256"] != context.plan_sha256:
            message = f"was trained by a plan other than {context.plan_sha256}"
            return step, [_plan_differs(trained, manifest["plan_sha256"], message)]
        if changed:
            return step, [result_differs(trained / changed[0], "is not what was exported")]
        if published.is_dir():
            difference = results_difference(trained, published, sorted(files))
            if difference is not None:
                return step, [result_differs(published, f"is not what was trained: {difference}")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, MergeError) as error:
        return None, [result_differs(trained, f"cannot be read ({error})")]
    return step, []


def result_differs(path: Path, message: str) -> Finding:
    """Return the finding that the run's result differs."""
    return audit_finding("audit-result-differs", field=path.name, message=f"{path} {message}")


def _provenance(context: RunContext, data_hash: str | None) -> Iterator[Finding]:
    path = context.output.provenance
    if not path.is_file():
        return
    try:
        predicate = json.loads(read_own(path))["predicate"]
        inner = predicate["buildDefinition"]["internalParameters"]
        (prepared,) = [byproduct["digest"]["sha256"] for byproduct in predicate["runDetails"]["byproducts"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield _plan_differs(path, "", f"is not the provenance of a result ({error})")
        return
    for package, known in predicate["runDetails"].get("builder", {}).get("version", {}).items():
        try:
            here = version(package)
        except PackageNotFoundError:  # the package runs from a checkout
            continue
        if here != known:  # another version may round differently
            message = f"The result was made with {package} {known}, but here is {here}: bytes may differ for that reason alone"
            fix = f"Install {package}=={known} to compare under the same conditions"
            yield not_proven(path.name, f"{package} {known}", message, fix)
    if inner.get("planSha256") != context.plan_sha256:
        yield _plan_differs(path, str(inner.get("planSha256")), f"names a plan other than {context.plan_sha256}")
    if data_hash is not None and prepared != data_hash:
        yield _data_differs(path.name, str(prepared), f"{path} names data other than the prepared data, {data_hash}")

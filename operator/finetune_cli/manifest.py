"""Parses manifests into jobs and profiles; what does not fit the schema becomes findings, one for each field.

This is stricter than reading an object of the API server, which has already refused wrong types: "2" is not a number here, and 1
is not true. The changes of a finding have been tried: with them the field is accepted, and no other field becomes wrong.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from finetune_cli.corrections.one_pass import findings_of, read, value_text, with_generated_name
from finetune_cli.corrections.wrong_field import nearest
from finetune_job.api.job import FineTuneJob
from finetune_job.api.profile import FineTuneProfile
from finetune_job.catalogue.book import make_finding
from finetune_job.finding import INVALID_FIELD, Finding
from finetune_job.names import JOB_KIND

M = TypeVar("M", bound=BaseModel)
_METADATA = (
    "annotations", "creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "finalizers", "generateName",
    "generation", "labels", "managedFields", "name", "namespace", "ownerReferences", "resourceVersion", "selfLink", "uid",
)  # fmt: skip
"""Fields that every Kubernetes object may have."""


def parse_job(content: Any) -> FineTuneJob | list[Finding]:
    """Return the job, or a finding for each reason why the document is not a job."""
    return _unknown_metadata(content) or _parse(FineTuneJob, with_generated_name(content))


def parse_profile(content: Any) -> FineTuneProfile | list[Finding]:
    """Return the profile, or a finding for each reason why the document is not a profile."""
    return _parse(FineTuneProfile, content)


def is_meant_as_job(kind: Any) -> bool:
    """Whether a `kind` is a misspelt FineTuneJob."""
    near = nearest(kind, [JOB_KIND])
    return near is not None and near[1] and kind != JOB_KIND


def _unknown_metadata(content: Any) -> list[Finding]:
    """Return a finding for each unknown field of metadata: the models do not check them, but Kubernetes refuses them."""
    metadata = content.get("metadata") if isinstance(content, dict) else None
    if not isinstance(metadata, dict):
        return []
    findings = []
    for name in metadata:
        if name not in _METADATA:
            near = nearest(name, [known for known in _METADATA if known not in metadata])
            fix = f"write {near[0]}" if near else f"remove metadata.{name}, or make it a label or an annotation"
            changes = {f"metadata.{name}": None, **({f"metadata.{near[0]}": metadata[name]} if near else {})}
            has_path = "." not in name
            findings.append(
                make_finding(
                    INVALID_FIELD,
                    field=f"metadata.{name}",
                    value=value_text(metadata[name]),
                    message="there is no such field",
                    fix=fix,
                    changes=changes if has_path else None,
                    is_proposal=near is None or not near[1],
                )
            )
    return findings


def _parse(model: type[M], content: Any) -> M | list[Finding]:
    try:
        return read(model, content)
    except ValidationError:
        return findings_of(model, content)

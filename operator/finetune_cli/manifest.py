"""Manifests as people write them -> jobs and profiles; what does not fit the schema becomes findings, one for each field.

Stricter than reading an object of the API server, which has already refused wrong types: "2" is not a number here, and 1 is not
true. A finding's changes have been tried: with them the field is accepted, and no other field is wrong in its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from finetune_cli.corrections.reading import read, with_generated_name
from finetune_job.api.job import FineTuneJob
from finetune_job.api.profile import FineTuneProfile
from finetune_job.catalogue.book import make_finding
from finetune_job.finding import INVALID_FIELD, Finding
from finetune_job.names import JOB_KIND

# The corrections are imported by the functions that need them: most manifests have no mistake.
if TYPE_CHECKING:
    from finetune_cli.corrections.one_pass import Correction
    from finetune_cli.corrections.wrong_field import WrongField

M = TypeVar("M", bound=BaseModel)
_METADATA = (
    "annotations", "creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "finalizers", "generateName",
    "generation", "labels", "managedFields", "name", "namespace", "ownerReferences", "resourceVersion", "selfLink", "uid",
)  # fmt: skip
"""Fields of every object of Kubernetes."""
_NOT_CORRECTED = "correct the fields above first; then validate again"
_OBJECT = "write an object with apiVersion, kind, metadata and spec"


def parse_job(content: Any) -> FineTuneJob | list[Finding]:
    """The job, or every way in which the document is none."""
    return _unknown_metadata(content) or _parse(FineTuneJob, with_generated_name(content))


def parse_profile(content: Any) -> FineTuneProfile | list[Finding]:
    """The profile, or every way in which the document is none."""
    return _parse(FineTuneProfile, content)


def is_meant_as_job(kind: Any) -> bool:
    """Whether a `kind` is a slip of the pen for a FineTuneJob."""
    from finetune_cli.corrections.wrong_field import nearest

    near = nearest(kind, [JOB_KIND])
    return near is not None and near[1] and kind != JOB_KIND


def _unknown_metadata(content: Any) -> list[Finding]:
    """The models leave what metadata holds to Kubernetes, which refuses these."""
    metadata = content.get("metadata") if isinstance(content, dict) else None
    if not isinstance(metadata, dict):
        return []
    findings = []
    for name in metadata:
        if name not in _METADATA:
            from finetune_cli.corrections.wrong_field import nearest, value_text

            near = nearest(name, [each for each in _METADATA if each not in metadata])
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
        return _findings(model, content)


def _findings(model: type[BaseModel], content: Any) -> list[Finding]:
    from finetune_cli.corrections.one_pass import corrections_of, wrong_fields

    fields = wrong_fields(model, content)
    corrections = corrections_of(model, content, fields)
    return [_finding(fields[name], correction) for name, correction in corrections.items()]


def _finding(wrong: WrongField, correction: Correction | None) -> Finding:
    """correction: None if there were too many wrong fields."""
    from finetune_cli.corrections.reasons import reason_of
    from finetune_cli.corrections.wrong_field import shortened, value_text

    uncorrected = _NOT_CORRECTED if wrong.place else _OBJECT
    return make_finding(
        INVALID_FIELD,
        field=wrong.name,
        value="unset" if wrong.kind == "missing" else value_text(wrong.value),
        message=(correction.message if correction is not None else "") or reason_of(wrong),
        fix=shortened(correction.fix, 400) if correction is not None else uncorrected,
        changes={change.field: change.value for change in (correction.changes if correction is not None else ())},
        is_proposal=correction is not None and not correction.is_certain,
    )

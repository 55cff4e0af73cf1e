"""Manifests as people write them -> jobs and profiles; what does not fit the schema becomes findings, one for each field.

Stricter than reading an object of the API server, which has already refused wrong types: "2" is not a number here, and 1 is not
true. A finding's changes have been tried: with them the field is accepted, and no other field is wrong in its place.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from finetune_job.api.job import FineTuneJob
from finetune_job.api.profile import FineTuneProfile
from finetune_job.catalogue.book import make_finding
from finetune_job.finding import UNREADABLE, FieldChange, Finding
from finetune_job.names import JOB_KIND
from finetune_job.rules.book import evaluate
from finetune_job.rules.rule import RuleContext, format_value, with_changes

# The corrections are imported by the functions that need them: most manifests have no mistake.
if TYPE_CHECKING:
    from finetune_cli.corrections.wrong_field import Place, Proposal, WrongField

M = TypeVar("M", bound=BaseModel)


_METADATA = (
    "annotations", "creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "finalizers", "generateName",
    "generation", "labels", "managedFields", "name", "namespace", "ownerReferences", "resourceVersion", "selfLink", "uid",
)  # fmt: skip
"""Fields of every object of Kubernetes."""
_MOST_TRIED = 16
"""Findings of a document whose changes are tried; each takes as long as reading the document a few times."""
_UNTRIED = "correct the fields above first; then a fix is told"
_OBJECT = "write an object with apiVersion, kind, metadata and spec"
_ROUNDS = 4
"""A misspelt field may hold a misspelt value, in quotes that do not belong there."""


@dataclass(frozen=True)
class _Correction:
    """Changes by which a finding is cleared, and how to say them."""

    fix: str
    message: str
    changes: tuple[FieldChange, ...]
    is_certain: bool
    is_refused: bool
    """Whether a rule has something against it."""


def parse_job(content: Any) -> FineTuneJob | list[Finding]:
    """The job, or every way in which the document is none."""
    return _unknown_metadata(content) or _parse(FineTuneJob, _with_generated_name(content))


def parse_profile(content: Any) -> FineTuneProfile | list[Finding]:
    """The profile, or every way in which the document is none."""
    return _parse(FineTuneProfile, content)


def is_meant_as_job(kind: Any) -> bool:
    """Whether a `kind` is a slip of the pen for a FineTuneJob."""
    from finetune_cli.corrections.wrong_field import nearest

    near = nearest(kind, [JOB_KIND])
    return near is not None and near[1] and kind != JOB_KIND


def _with_generated_name(content: Any) -> Any:
    """With a name like the one that Kubernetes makes of metadata.generateName: five characters more than 58 of it at most."""
    metadata = content.get("metadata") if isinstance(content, dict) else None
    if not isinstance(metadata, dict) or metadata.get("name") is not None:
        return content
    beginning = metadata.get("generateName")
    if not isinstance(beginning, str) or not beginning:
        return content
    return content | {"metadata": metadata | {"name": f"{beginning[:58]}xxxxx"}}


def _unknown_metadata(content: Any) -> list[Finding]:
    """The models leave what metadata holds to Kubernetes, which refuses these."""
    metadata = content.get("metadata") if isinstance(content, dict) else None
    if not isinstance(metadata, dict):
        return []
    found = []
    for name in metadata:
        if name not in _METADATA:
            from finetune_cli.corrections.wrong_field import nearest

            near = nearest(name, [each for each in _METADATA if each not in metadata])
            fix = f"write {near[0]}" if near else f"remove metadata.{name}, or make it a label or an annotation"
            changes = {f"metadata.{name}": None, **({f"metadata.{near[0]}": metadata[name]} if near else {})}
            has_path = "." not in name
            found.append(
                make_finding(
                    UNREADABLE,
                    field=f"metadata.{name}",
                    value=_value(metadata[name]),
                    message="there is no such field",
                    fix=fix,
                    changes=changes if has_path else None,
                    is_proposal=near is None or not near[1],
                )
            )
    return found


def _parse(model: type[M], content: Any) -> M | list[Finding]:
    try:
        return _read(model, content)
    except ValidationError as error:
        return _findings(model, content, error)


def _read(model: type[M], content: Any) -> M:
    # JSON is where strictness and the words of enumerations go together.
    return model.model_validate_json(json.dumps(content), strict=True, by_alias=True, by_name=False)


def _wrong_fields(model: type[BaseModel], content: Any, error: ValidationError) -> dict[str, WrongField]:
    """By path. Several complaints about one field come from the same mistake; the first names it."""
    from finetune_cli.corrections.wrong_field import WrongField

    found: dict[str, WrongField] = {}
    for details in error.errors(include_url=False):
        place = tuple(details["loc"])
        if place and place[-1] == "[key]" and details["type"] != "extra_forbidden":
            place = place[:-1]  # of what is wrong with a key of a mapping
        value = None if details["type"] == "missing" else details.get("input")
        wrong = WrongField(model, content, place, details["type"], details.get("ctx") or {}, value, str(details["msg"]))
        found.setdefault(wrong.name, wrong)
    return found


def _findings(model: type[BaseModel], content: Any, error: ValidationError) -> list[Finding]:
    fields = _wrong_fields(model, content, error)
    return [
        _finding(wrong, fields, is_tried=bool(wrong.place) and number < _MOST_TRIED)
        for number, wrong in enumerate(fields.values())
    ]


def _finding(wrong: WrongField, fields: dict[str, WrongField], *, is_tried: bool) -> Finding:
    from finetune_cli.corrections.names import all_proposals

    first = _best(_corrections(wrong, fields)) if is_tried else None
    if first is None and is_tried:
        first = next((_Correction(each.fix, each.message, (), False, False) for each in all_proposals(wrong)), None)
    changes = first.changes if first is not None else ()
    return make_finding(
        UNREADABLE,
        field=wrong.name,
        value="unset" if wrong.kind == "missing" else _value(wrong.value),
        message=(first.message if first is not None else "") or _reason(wrong),
        fix=_shortened(first.fix, 400) if first is not None else _UNTRIED if wrong.place else _OBJECT,
        changes={change.field: change.value for change in changes},
        is_proposal=first is not None and not first.is_certain,
    )


def _best(corrections: Iterator[_Correction]) -> _Correction | None:
    """The first that no rule refuses, or else the first."""
    refused = None
    for each in corrections:
        if not each.is_refused:
            return each
        refused = refused or each
    return refused


def _reason(wrong: WrongField) -> str:
    match wrong.kind:
        case "extra_forbidden":
            return "there is no such field"
        case "missing":
            return "is required"
        case "enum" | "literal_error":
            return _shortened(f"is not one of {wrong.context.get('expected')}", 200)
        case "value_error":
            return str(wrong.context.get("error")).partition("; ")[0]
        case "string_pattern_mismatch":
            return "is not written in the form that this field takes"
        case _:
            return wrong.message.removeprefix("Input ")


def _corrections(wrong: WrongField, fields: dict[str, WrongField]) -> Iterator[_Correction]:
    """Those proposals that make the field right, each with what its value needs to be right, too."""
    from finetune_cli.corrections.names import all_proposals

    for proposal in all_proposals(wrong):
        changes, is_certain = _changes(wrong.content, proposal), proposal.is_certain
        for _ in range(_ROUNDS):
            if changes is None:
                break
            content = with_changes(wrong.content, changes)
            left = _new_mistakes(wrong, fields, content)
            if not left:
                # Of several values for one field the last counts.
                last = tuple({change.field: change for change in changes}.values())
                is_refused = not is_certain and _is_refused(wrong, content)
                yield _Correction(_fix_text(proposal, changes), proposal.message, last, is_certain, is_refused)
                break
            following = next(all_proposals(left[0]), None)
            more = None if following is None else _changes(content, following)
            changes = None if more is None else (*changes, *more)
            is_certain = is_certain and following is not None and following.is_certain


def _fix_text(proposal: Proposal, changes: Sequence[FieldChange]) -> str:
    """With the value that is written in the end, if the proposal was only a step to it."""
    if len(changes) == len(proposal.more) + 1 or changes[-1].value is None:
        return proposal.fix
    return f"{proposal.fix}, as {changes[-1].field.rpartition('.')[2]}: {_value(changes[-1].value)}"


def _new_mistakes(wrong: WrongField, fields: dict[str, WrongField], content: Any) -> list[WrongField]:
    """What the schema refuses of a changed document and did not before; the field itself first, if it is still wrong."""
    try:
        _read(wrong.model, _with_generated_name(content))
    except ValidationError as error:
        found = _wrong_fields(wrong.model, content, error)
    else:
        return []
    return [each for name, each in found.items() if name == wrong.name or name not in fields]


def _is_refused(wrong: WrongField, content: Any) -> bool:
    """Whether a rule refuses a corrected document for what the same document without the field is not refused for."""
    from finetune_cli.corrections.wrong_field import Proposal

    without = _changes(wrong.content, Proposal("", wrong.plain, None))
    before = _rule_errors(wrong, with_changes(wrong.content, without or ()))
    return not _rule_errors(wrong, content) <= before


def _rule_errors(wrong: WrongField, content: Any) -> set[str]:
    """Ids of the rules that refuse a job; none if other fields are still wrong, because nobody can tell then."""
    if wrong.model is not FineTuneJob:
        return set()
    try:
        job = _read(FineTuneJob, _with_generated_name(content))
    except ValidationError:
        return set()
    return {each.rule for each in evaluate(RuleContext(job.spec)) if each.severity == "error"}


def _changes(content: Any, proposal: Proposal) -> tuple[FieldChange, ...] | None:
    """The changes of a proposal by plain paths; None if some place has no path."""
    made = [_change(content, place, value) for place, value in ((proposal.place, proposal.value), *proposal.more)]
    return None if any(each is None for each in made) else tuple(each for each in made if each is not None)


def _change(content: Any, place: Place, value: Any) -> FieldChange | None:
    """A change of an entry of a list, or of a key with dots, is one of the whole that holds it."""
    depth = next((number for number, part in enumerate(place) if isinstance(part, int) or "." in part), len(place))
    names = place[:depth]
    if not names:
        return None
    held = content
    for part in names:
        held = held.get(part) if isinstance(held, dict) else None
    new = _replaced(held, place[depth:], value)
    return FieldChange(field=".".join(map(str, names)), value=new)


def _replaced(held: Any, place: Place, value: Any) -> Any:
    if not place:
        return value
    head, *rest = place
    if isinstance(held, list) and isinstance(head, int) and head < len(held):
        inner = _replaced(held[head], rest, value)
        return [*held[:head], *([] if inner is None else [inner]), *held[head + 1 :]]
    if isinstance(held, dict):
        inner = _replaced(held.get(head), rest, value)
        kept = {name: item for name, item in held.items() if name != head}
        return kept if inner is None else {**held, head: inner}
    return value


def _value(written: Any) -> str:
    if isinstance(written, dict):
        return "a mapping"
    return _shortened(json.dumps(written) if isinstance(written, str) else format_value(written))


def _shortened(text: str, longest: int = 100) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."

"""Proposals tried on the document: only one with which the field is accepted, and no other is wrong in its place, is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel, ValidationError

from finetune_cli.corrections.names import all_proposals
from finetune_cli.corrections.reading import read, with_generated_name
from finetune_cli.corrections.wrong_field import Place, Proposal, WrongField, path_text, value_text
from finetune_job.api.job import FineTuneJob
from finetune_job.finding import FieldChange
from finetune_job.rules.book import evaluate
from finetune_job.rules.rule import RuleContext, with_changes

_ROUNDS = 4
"""A misspelt field may hold a misspelt value, in quotes that do not belong there."""


@dataclass(frozen=True)
class Correction:
    """Changes by which a finding is cleared, and how to say them."""

    fix: str
    message: str = ""
    changes: tuple[FieldChange, ...] = ()
    is_certain: bool = False
    refusal: str = ""
    """What a rule has against it."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """What gets a value, by path, if only on the way to another place: two that are moved from there were meant for it."""


@dataclass(frozen=True)
class _Step:
    """A proposal by plain paths; its own place first."""

    proposal: Proposal
    changes: tuple[FieldChange, ...]
    is_free: bool
    """Whether nothing that is written is lost where it writes more."""


def wrong_fields(model: type[BaseModel], content: Any, error: ValidationError) -> dict[str, WrongField]:
    """By path. Several complaints about one field come from the same mistake; the first names it."""
    found: dict[str, WrongField] = {}
    for details in error.errors(include_url=False):
        place = tuple(details["loc"])
        if place and place[-1] == "[key]" and details["type"] != "extra_forbidden":
            place = place[:-1]  # of what is wrong with a key of a mapping
        value = None if details["type"] == "missing" else details.get("input")
        wrong = WrongField(model, content, place, details["type"], details.get("ctx") or {}, value, str(details["msg"]))
        found.setdefault(wrong.name, wrong)
    return found


def corrections_of(tried: Sequence[WrongField], fields: dict[str, WrongField]) -> dict[str, Correction]:
    """By path, of which no two write different values to one place. fields: all that is wrong, by path."""
    found = {wrong.name: _correction_of(wrong, fields, {}) for wrong in tried}
    taken: dict[str, tuple[Any, str]] = {}
    # What is missing may be there under another name, and has but an example.
    there = [wrong for wrong in tried if wrong.kind != "missing"]
    # Another name for a field gives way to the field itself, and what is not certain to what is.
    for wrong in sorted(there, key=lambda each: (each.kind == "extra_forbidden", not found[each.name].is_certain)):
        if wrong.kind == "extra_forbidden" and _clash(found[wrong.name], taken):
            found[wrong.name] = _correction_of(wrong, fields, taken)
        for path, value in _leaves(found[wrong.name].written):
            taken.setdefault(path, (value, wrong.name))
    return found


def _leaves(written: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for path, value in written.items():
        if isinstance(value, dict):
            yield from _leaves({f"{path}.{name}": inner for name, inner in value.items()})
        else:
            yield path, value


def _clash(correction: Correction, taken: Mapping[str, tuple[Any, str]]) -> str:
    """A place that gets another value already; empty if there is none."""
    return next((path for path, value in _leaves(correction.written) if path in taken and taken[path][0] != value), "")


def _correction_of(wrong: WrongField, fields: dict[str, WrongField], taken: Mapping[str, tuple[Any, str]]) -> Correction:
    """The first that no rule refuses, or else the first; if there is none, words alone.

    taken: by path what others write, and the field for whose sake.
    """
    refused, clash = None, ""
    for each in _corrections(wrong, fields):
        clash = clash or _clash(each, taken)
        if clash and each.written:
            continue
        if clash:
            return replace(each, fix=f"remove {wrong.name}, or take it for {clash} in place of {taken[clash][1]}")
        if not each.refusal and refused is not None and wrong.kind == "extra_forbidden":
            return replace(each, fix=f"{each.fix}; by its right name it is refused: {refused.refusal}")
        if not each.refusal:
            return each
        refused = refused or each
    in_words = next((Correction(each.fix, each.message) for each in all_proposals(wrong)), None)
    return refused or in_words or Correction("write another value")


def _corrections(wrong: WrongField, fields: dict[str, WrongField]) -> Iterator[Correction]:
    """Those proposals that make the field right, each with what its value needs to be right, too."""
    for proposal in all_proposals(wrong):
        steps: list[_Step] = []
        following: Proposal | None = proposal
        content = wrong.content
        for _ in range(_ROUNDS):
            changes = None if following is None else _changes(content, following)
            if following is None or changes is None:
                break
            is_free = all(_is_free(content, place) for place, _ in following.more)
            steps.append(_Step(following, changes, is_free))
            content = with_changes(content, changes)
            left = _new_mistakes(wrong, fields, content, steps)
            if not left:
                yield _correction(wrong, content, steps)
                break
            following = next(all_proposals(left[0]), None)


def _correction(wrong: WrongField, content: Any, steps: Sequence[_Step]) -> Correction:
    # Of several values for one field the last counts.
    last = {change.field: change for step in steps for change in step.changes}
    is_certain = all(step.proposal.is_certain and step.is_free for step in steps)
    refusal = "" if is_certain else _refusal(wrong, content)
    made = [each for step in steps for each in ((step.proposal.place, step.proposal.value), *step.proposal.more)]
    written = {path_text(place): value for place, value in made if value is not None}
    return Correction(_fix_text(steps), steps[0].proposal.message, tuple(last.values()), is_certain, refusal, written)


def _fix_text(steps: Sequence[_Step]) -> str:
    """With the value that is written in the end, if the proposal was only a step to it."""
    moved = max((number for number, step in enumerate(steps) if step.proposal.value is None and step.proposal.more), default=0)
    first, *others = steps[moved:]
    if not others:
        return first.proposal.fix
    end = others[-1]
    if end.changes[0].value is None:
        return f"{first.proposal.fix}; {end.proposal.fix}"
    written = f"{end.changes[0].field.rpartition('.')[2]}: {value_text(end.changes[0].value)}"
    return ", and ".join([f"{first.proposal.fix}, as {written}", *([end.proposal.note] if end.proposal.note else [])])


def _new_mistakes(wrong: WrongField, fields: dict[str, WrongField], content: Any, steps: Sequence[_Step]) -> list[WrongField]:
    """What the schema refuses of a changed document and did not before, or of what was changed."""
    try:
        read(wrong.model, with_generated_name(content))
    except ValidationError as error:
        found = wrong_fields(wrong.model, content, error)
    else:
        return []
    made = {wrong.name, *(change.field for step in steps for change in step.changes)}
    return [each for name, each in found.items() if name in made or name not in fields]


def _refusal(wrong: WrongField, content: Any) -> str:
    """What a rule has against a corrected document that it does not have against the same document without the field."""
    without = _changes(wrong.content, Proposal("", wrong.plain, None))
    before = _rule_errors(wrong, with_changes(wrong.content, without or ()))
    return next((message for rule, message in _rule_errors(wrong, content).items() if rule not in before), "")


def _rule_errors(wrong: WrongField, content: Any) -> dict[str, str]:
    """What rules say that refuse a job, by id; nothing if other fields are still wrong, because nobody can tell then."""
    if wrong.model is not FineTuneJob:
        return {}
    try:
        job = read(FineTuneJob, with_generated_name(content))
    except ValidationError:
        return {}
    findings = evaluate(RuleContext(job.spec, job_name=job.metadata.name))
    return {each.rule: each.message for each in findings if each.severity == "error"}


def _changes(content: Any, proposal: Proposal) -> tuple[FieldChange, ...] | None:
    """The changes of a proposal by plain paths; None if some place has no path."""
    made: list[FieldChange] = []
    for place, value in ((proposal.place, proposal.value), *proposal.more):
        # Two changes of one list are two versions of the whole of it.
        change = _change(with_changes(content, made), place, value)
        if change is None:
            return None
        made.append(change)
    return tuple(made)


def _is_free(content: Any, place: Place) -> bool:
    """Whether nothing is written in a place, nor anything in its way that is no mapping."""
    held = content
    for part in place:
        if isinstance(held, dict):
            held = held.get(part)
        elif isinstance(held, list) and isinstance(part, int):
            held = held[part] if part < len(held) else None
        else:
            return held is None
    return held is None


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

"""Corrects all wrong fields of a document together in a draft, validates the draft, and keeps the corrections that validate.

A correction may need another correction: a misspelt name may hold a misspelt value. The draft is validated after each round, so
a document is read only a few times, however many of its fields are wrong.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from finetune_cli.corrections.proposals import propose, reason_of
from finetune_cli.corrections.wrong_field import Place, Proposal, WrongField, value_at, with_value
from finetune_job.catalogue.book import make_finding
from finetune_job.finding import INVALID_FIELD, Finding
from finetune_job.rules.rule import format_value

M = TypeVar("M", bound=BaseModel)
_ROUNDS = 5
_MOST_CORRECTED = 256
"""Maximum number of fields corrected in one document: more than anybody gets wrong by accident."""
_LEAST_CORRECTED = 16
_CHARACTERS = 1_000_000
"""Maximum total size of all changes. A change to a list entry holds the whole list, so large documents get fewer corrections."""


def read(model: type[M], content: Any) -> M:
    """Read a document as a model of the API. Raises ValidationError."""
    # Pydantic's strict mode accepts the words of enumerations only in JSON.
    return model.model_validate_json(json.dumps(content), strict=True, by_alias=True, by_name=False)


def with_generated_name(content: Any) -> Any:
    """Add a name like the one that Kubernetes generates from metadata.generateName: its first 58 characters, and five more."""
    metadata = content.get("metadata") if isinstance(content, dict) else None
    if not isinstance(metadata, dict) or metadata.get("name") is not None:
        return content
    beginning = metadata.get("generateName")
    if not isinstance(beginning, str) or not beginning:
        return content
    return content | {"metadata": metadata | {"name": f"{beginning[:58]}xxxxx"}}


def wrong_fields(model: type[BaseModel], content: Any) -> dict[str, WrongField]:
    """Validate a document, and map the path of each wrong field to the field. Of several errors in a field, the first counts."""
    try:
        read(model, with_generated_name(content))
    except ValidationError as error:
        fields: dict[str, WrongField] = {}
        for details in error.errors(include_url=False):
            place = tuple(details["loc"])
            if place and place[-1] == "[key]" and details["type"] != "extra_forbidden":
                place = place[:-1]  # the key of a mapping is wrong
            value = None if details["type"] == "missing" else details.get("input")
            wrong = WrongField(model, content, place, details["type"], details.get("ctx") or {}, value, str(details["msg"]))
            fields.setdefault(wrong.name, wrong)
        return fields
    return {}


def findings_of(model: type[BaseModel], content: Any) -> list[Finding]:
    """Return a finding for each wrong field of a document, except a missing field that is written under another name."""
    fields = wrong_fields(model, content)
    most = min(max(_CHARACTERS // len(json.dumps(content)), _LEAST_CORRECTED), _MOST_CORRECTED)
    corrected = [wrong for wrong in fields.values() if wrong.place][:most]
    repairs = {wrong.name: _Repair(wrong) for wrong in corrected if wrong.kind != "missing"}
    draft = content
    for _ in range(_ROUNDS):
        for wrong, repair in list(_left(model, draft, repairs.values())):
            draft = repair.take(wrong, draft)
    for _, repair in _left(model, draft, repairs.values()):
        repair.give_up()
    for wrong in corrected:
        if wrong.kind == "missing" and value_at(draft, wrong.place) is None:
            repairs[wrong.name] = repair = _Repair(wrong)
            repair.take(wrong, content)
    is_replaced = {wrong.name for wrong in corrected if wrong.kind == "missing"} - repairs.keys()
    return [_finding(wrong, repairs.get(name), content) for name, wrong in fields.items() if name not in is_replaced]


def _finding(wrong: WrongField, repair: _Repair | None, content: Any) -> Finding:
    """Make the finding of a wrong field. repair: None if there were too many wrong fields."""
    value = "unset" if wrong.kind == "missing" else value_text(wrong.value)
    if repair is None:
        fix = "correct the fields above first; then validate again"
        fix = fix if wrong.place else "write an object with apiVersion, kind, metadata and spec"
        return make_finding(INVALID_FIELD, field=wrong.name, value=value, message=reason_of(wrong), fix=fix)
    # To change an entry of a list, or a key with dots, the whole list or mapping is replaced.
    changes: dict[str, Any] = {}
    for place, new in repair.edits:
        content = with_value(content, place, new)
        depth = next((number for number, part in enumerate(place) if isinstance(part, int) or "." in part), len(place))
        changes[".".join(map(str, place[:depth]))] = value_at(content, place[:depth])
    is_possible = "" not in changes
    return make_finding(
        INVALID_FIELD,
        field=wrong.name,
        value=value,
        message=repair.steps[wrong.place].message or reason_of(wrong),
        fix=_shortened("; then ".join(proposal.fix for proposal in repair.steps.values()), 400),
        changes=changes if is_possible else None,
        is_proposal=not (repair.is_certain and is_possible),
    )


def value_text(written: Any) -> str:
    """Return a value as it is written in a manifest, shortened if it is long."""
    if isinstance(written, dict):
        return "a mapping"
    return _shortened(json.dumps(written) if isinstance(written, str) else format_value(written), 100)


def _shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


@dataclass
class _Repair:
    """The correction of one field, to which each round may add a step."""

    wrong: WrongField
    steps: dict[Place, Proposal] = field(default_factory=dict)
    """The last proposal for each place that was wrong in some round."""
    edits: list[tuple[Place, Any]] = field(default_factory=list)
    """The edits of all steps."""
    is_certain: bool = True
    is_open: bool = True
    """Whether further steps may follow; False: the field is left to a person."""

    def take(self, wrong: WrongField, draft: Any) -> Any:
        """Add the proposal for a field that is wrong in the draft, and return the draft with the proposal's edits applied."""
        proposal = propose(replace(wrong, content=draft))
        others = [place for place, _ in proposal.edits if place != wrong.place]
        self.steps[wrong.place] = proposal
        self.is_certain = self.is_certain and proposal.is_certain and all(_is_free(draft, place) for place in others)
        self.edits += proposal.edits
        if not proposal.edits:
            self.give_up()
        for place, value in proposal.edits:
            draft = with_value(draft, place, value)
        return draft

    def give_up(self) -> None:
        """Leave the field to a person, but keep the advice of all steps."""
        self.edits, self.is_certain, self.is_open = [], False, False

    def covers(self, place: Place) -> int:
        """Return the length of the longest prefix of a place that this repair writes; 0 if there is none."""
        written = [self.wrong.place, *(edited for edited, _ in self.edits)] if self.is_open else []
        return max((len(each) for each in written if place[: len(each)] == each), default=0)


def _left(model: type[BaseModel], draft: Any, repairs: Collection[_Repair]) -> Iterator[tuple[WrongField, _Repair]]:
    """Yield the fields that are still wrong in the draft, each with the repair that wrote it; unknown fields come last."""
    for wrong in sorted(wrong_fields(model, draft).values(), key=lambda wrong: wrong.kind == "extra_forbidden"):
        repair = max(repairs, key=lambda repair: repair.covers(wrong.place), default=None)
        if repair is not None and repair.covers(wrong.place):
            yield wrong, repair


def _is_free(content: Any, place: Place) -> bool:
    """Whether a place is unset, and every value on the path to the place is a mapping or a list."""
    for depth in range(1, len(place) + 1):
        value = value_at(content, place[:depth])
        if value is None:
            return True
        if not isinstance(value, dict | list):
            return False
    return False

"""All wrong fields of a document are corrected together in a draft, the draft is validated, and what validates is kept.

A correction may need another one: a misspelt name may hold a misspelt value. The draft is validated after each round, so that a
document is read a few times, however many of its fields are wrong.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from finetune_cli.corrections.proposals import Proposal, last_resort, propose
from finetune_cli.corrections.reading import read, with_generated_name
from finetune_cli.corrections.wrong_field import Place, WrongField, is_alike, path_text, value_at, value_text, with_value
from finetune_job.finding import FieldChange

_ROUNDS = 4
_MOST_CORRECTED = 256
"""Fields of a document that are corrected: more than a person gets wrong by mistake."""
_LEAST_CORRECTED = 16
_CHARACTERS = 1_000_000
"""A change of an entry of a list holds the whole list: of a large document, fewer fields are corrected."""
_SAME = object()
"""The value of a place that another field's correction writes, too."""


@dataclass(frozen=True)
class Correction:
    """Changes by which a finding is cleared, and how to say them."""

    fix: str
    message: str = ""
    changes: tuple[FieldChange, ...] = ()
    is_certain: bool = False


def wrong_fields(model: type[BaseModel], content: Any) -> dict[str, WrongField]:
    """Validate a document, and map the path of each wrong field to it. The first of several complaints about a field counts."""
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


def corrections_of(model: type[BaseModel], content: Any, fields: Mapping[str, WrongField]) -> dict[str, Correction | None]:
    """Map the path of each wrong field to its correction; None if there were too many.

    A missing field that was found under another name is left out.
    """
    most = min(max(_CHARACTERS // len(json.dumps(content)), _LEAST_CORRECTED), _MOST_CORRECTED)
    corrected = [wrong for wrong in fields.values() if wrong.place][:most]
    draft = _Draft(model, content)
    draft.begin([wrong for wrong in corrected if wrong.kind != "missing"])
    draft.validate()
    corrections: dict[str, Correction | None] = {}
    for name, wrong in fields.items():
        if name in draft.repairs:
            corrections[name] = draft.repairs[name].correction(content, draft.content)
        elif wrong.kind != "missing" or wrong not in corrected:
            corrections[name] = None
        elif value_at(draft.content, wrong.place) is None:
            repair = _Repair(wrong)
            repair.add(wrong, propose(wrong), content)
            corrections[name] = repair.correction(content, content)
    return corrections


@dataclass
class _Repair:
    """The correction of one field while it grows."""

    wrong: WrongField
    steps: list[tuple[WrongField, Proposal]] = field(default_factory=list)
    edits: list[tuple[Place, Any]] = field(default_factory=list)
    is_certain: bool = True
    is_settled: bool = False
    """Whether the draft still has the field: an entry of a list stays there, so that the others keep their places."""

    def add(self, wrong: WrongField, proposal: Proposal, content: Any) -> list[tuple[Place, Any]]:
        """Take a proposal, and return its edits."""
        edits = [(wrong.place, proposal.value), *proposal.more]
        is_free = all(_is_free(content, place) for place, _ in proposal.more)
        self.is_certain = self.is_certain and proposal.is_certain and is_free
        self.steps.append((wrong, proposal))
        self.edits += edits
        self.is_settled = proposal.value is None and isinstance(wrong.place[-1], int) and not proposal.more
        return edits[1:] if self.is_settled else edits

    def covers(self, place: Place) -> int:
        """How many parts of a place this repair has written, or is about."""
        places = [self.wrong.place, *(written for written, value in self.edits if value is not None)]
        return max((len(each) for each in places if place[: len(each)] == each), default=0)

    def correction(self, content: Any, draft: Any) -> Correction:
        """The changes, by plain paths. An entry of a list, or a key with dots, is changed with the whole that holds it."""
        changes: dict[str, FieldChange] = {}
        for place, value in self.edits:
            content = with_value(content, place, value_at(draft, place) if value is _SAME else value)
            depth = next((number for number, part in enumerate(place) if isinstance(part, int) or "." in part), len(place))
            path = ".".join(map(str, place[:depth]))
            changes[path] = FieldChange(field=path, value=value_at(content, place[:depth]))
        is_possible = "" not in changes
        return Correction(
            self._fix_text(),
            self.steps[0][1].message,
            tuple(changes.values()) if is_possible else (),
            is_certain=self.is_certain and is_possible,
        )

    def _fix_text(self) -> str:
        """The fix, with the value that is written in the end if the first proposal was only a step to it."""
        moves = (number for number, (_, proposal) in enumerate(self.steps) if proposal.is_move)
        (_, first), *others = self.steps[max(moves, default=0) :]
        if not others:
            return first.fix
        wrong, last = others[-1]
        if last.value is None:
            return f"{first.fix}; {last.fix}"
        written = f"{first.fix}, as {wrong.plain[-1]}: {value_text(last.value)}"
        return f"{written}, and {last.note}" if last.note else written


class _Draft:
    """A document with its corrections."""

    def __init__(self, model: type[BaseModel], content: Any) -> None:
        self.model, self.content = model, content
        self.repairs: dict[str, _Repair] = {}
        self._written: dict[str, tuple[Any, str]] = {}
        """Path -> value, and the field for whose sake it is written."""

    def begin(self, fields: Sequence[WrongField]) -> None:
        """Take the first proposal for each field, so that no two write different values to one place."""
        holders = Counter(place[:depth] for place in (wrong.place for wrong in fields) for depth in range(len(place)))
        proposals = {wrong.name: propose(wrong, is_crowded=holders[wrong.plain] > 1) for wrong in fields}
        # Another name for a field gives way to the field itself, and what is not certain to what is.
        for wrong in sorted(fields, key=lambda each: (each.kind == "extra_forbidden", not proposals[each.name].is_certain)):
            repair, proposal = _Repair(wrong), proposals[wrong.name]
            leaves = dict(_leaves({path_text(place): value for place, value in proposal.more}))
            shared = {path: self._written[path] for path in leaves if path in self._written}
            rival = next((path for path, (value, _) in shared.items() if not is_alike(value, leaves[path])), None)
            if rival is not None:
                other = self._written[rival][1]
                proposal = Proposal(f"remove {wrong.name}, or take it for {rival} in place of {other}")
            elif shared and len(shared) == len(leaves):
                # The other field may still be respelt.
                same = tuple((place, _SAME) for place, _ in proposal.more)
                proposal = Proposal(proposal.fix, is_certain=proposal.is_certain, more=same)
            self._apply(repair, wrong, proposal)
            self.repairs[wrong.name] = repair
            own = {wrong.name: proposal.value, **{path_text(place): value for place, value in proposal.more}}
            for path, value in _leaves(own):
                if value is not None and value is not _SAME:
                    self._written.setdefault(path, (value, wrong.name))

    def validate(self) -> None:
        """Correct what the corrections have written until the schema accepts it; where it does not, leave the field out."""
        for _ in range(_ROUNDS):
            left = list(self._left())
            for wrong, repair in left:
                self._apply(repair, wrong, propose(wrong, is_crowded=True))
            if not left:
                return
        for repair in {id(repair): repair for _, repair in self._left()}.values():
            repair.steps, repair.edits, repair.is_certain = [], [], False
            self._apply(repair, repair.wrong, last_resort(repair.wrong))
        for _, repair in self._left():
            repair.edits = []

    def _left(self) -> Iterator[tuple[WrongField, _Repair]]:
        """Yield the fields that are still wrong, each with the repair that has written it."""
        for wrong in wrong_fields(self.model, self.content).values():
            repair = max(self.repairs.values(), key=lambda each: each.covers(wrong.place), default=None)
            if repair is not None and repair.covers(wrong.place) and not repair.is_settled:
                yield wrong, repair

    def _apply(self, repair: _Repair, wrong: WrongField, proposal: Proposal) -> None:
        for place, value in repair.add(wrong, proposal, self.content):
            if value is not _SAME:
                self.content = with_value(self.content, place, value)


def _leaves(written: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for path, value in written.items():
        if isinstance(value, dict):
            yield from _leaves({f"{path}.{name}": inner for name, inner in value.items()})
        else:
            yield path, value


def _is_free(content: Any, place: Place) -> bool:
    """Whether nothing is written at a place, nor anything that is no mapping on the way to it."""
    for depth in range(1, len(place) + 1):
        held = value_at(content, place[:depth])
        if held is None:
            return True
        if not isinstance(held, dict | list):
            return False
    return False

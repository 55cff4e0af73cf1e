"""What to write in place of a field that there is not, or of a word that an enumeration does not have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from finetune_cli.corrections.other_tools import WORD_ANSWERS, WORDS, answer
from finetune_cli.corrections.proposals import proposals
from finetune_cli.corrections.wrong_field import Place, Proposal, WrongField, fields_of, letters, model_at, nearest, paths_of
from finetune_job.api.job import FineTuneJob, FineTuneJobSpec
from finetune_job.methods import METHODS
from finetune_job.rules.method_configuration.lora import REFUSED_INITS

_REFUSED_WORDS = frozenset({*map(str, REFUSED_INITS), *(str(kind) for kind, method in METHODS.items() if method.refused)})
"""Values that the schema has so that a rule can say why they are refused: nobody is advised to write them."""


def all_proposals(wrong: WrongField) -> Iterator[Proposal]:
    """For any wrong field, the likeliest first."""
    match wrong.kind:
        case "extra_forbidden":
            return _unknown(wrong)
        case "enum" | "literal_error":
            return _words(wrong)
        case _:
            return proposals(wrong)


def _unknown(wrong: WrongField) -> Iterator[Proposal]:
    """For a field that there is not: its right name, what another tool's setting is here, its right place, or its removal."""
    *parents, name = wrong.place
    holder = model_at(wrong.model, wrong.place)
    allowed = fields_of(holder)
    is_job = wrong.model is FineTuneJob and parents[:1] == ["spec"]
    written = wrong.content
    for part in parents:
        written = written[part]
    free = [each for each in allowed if each not in written]
    same = next((each for each in free if letters(each) == letters(str(name))), None)
    if same is not None:
        yield _renamed(wrong, (*parents, same), f"write {same}", is_certain=True)
    if is_job:
        yield from _of_other_tool(wrong, str(name))
    near = nearest(str(name), free)
    if near is not None and near[1]:
        yield _renamed(wrong, (*parents, near[0]), f"write {near[0]}", is_certain=True)
    if is_job:
        yield from _elsewhere(wrong, str(name))
    if near is not None:
        yield _renamed(wrong, (*parents, near[0]), f"write {near[0]}", is_certain=False)
    taken = nearest(str(name), allowed)
    reason = f"{taken[0]} is written already" if taken is not None else f"allowed here: {', '.join(sorted(allowed))}"
    yield Proposal(f"remove {wrong.name}; {reason}", wrong.place, None)


def _renamed(wrong: WrongField, place: Place, fix: str, *, is_certain: bool) -> Proposal:
    return Proposal(fix, wrong.place, None, is_certain, ((tuple(place), wrong.value),))


def _of_other_tool(wrong: WrongField, name: str) -> Iterator[Proposal]:
    spec = wrong.content["spec"]
    found = answer(name, wrong.value, spec)
    if found is None:
        return
    places = {("spec", *path.split(".")): value for path, value in found.changes.items()}
    is_free = all(_at(wrong.content, place) is None for place in places)
    if is_free:
        yield Proposal(found.fix, wrong.place, None, found.is_certain, tuple(places.items()))
    else:
        taken = next(place for place in places if _at(wrong.content, place) is not None)
        yield Proposal(f"remove it, or {found.fix}: {'.'.join(taken)} is written already", wrong.place, None)


def _elsewhere(wrong: WrongField, name: str) -> Iterator[Proposal]:
    """A field of this name in another part of the spec, if there is one alone."""
    paths = [path for path in paths_of(FineTuneJobSpec) if letters(path[-1]) == letters(name)]
    if len(paths) == 1 and _at(wrong.content, ("spec", *paths[0])) is None:
        place = ("spec", *paths[0])
        yield _renamed(wrong, place, f"write {'.'.join(place)}", is_certain=True)


def _at(content: Any, place: Place) -> Any:
    for part in place:
        content = content.get(part) if isinstance(content, dict) else None
    return content


def _words(wrong: WrongField) -> Iterator[Proposal]:
    """For a value that an enumeration does not have: ours for another tool's, the nearest, or the list of all."""
    path = ".".join(str(part) for part in wrong.place[1:])
    asked = letters(str(wrong.value).lower())
    known = WORDS.get(path, {}).get(asked)
    if known is not None and wrong.place[0] == "spec":
        yield Proposal(f"write {known}", wrong.place, known, is_certain=True)
    meant, why = WORD_ANSWERS.get(path, {}).get(asked, (None, ""))
    if meant is not None:
        yield Proposal(f"write {meant}: {why}", wrong.place, meant)
    expected = str(wrong.context.get("expected"))
    for proposal in proposals(wrong):
        if proposal.value in _REFUSED_WORDS:
            accepted = ", ".join(
                word for word in expected.replace("'", "").replace(" or ", ", ").split(", ") if word not in _REFUSED_WORDS
            )
            without = next(each for each in proposals(wrong) if each.value not in _REFUSED_WORDS)
            yield replace(without, fix=f"write one of {accepted}; {proposal.value} is not supported", is_certain=False)
        elif proposal.value is None:
            yield replace(proposal, fix=f"write {expected}")
        else:
            yield proposal

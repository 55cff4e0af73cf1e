"""What to write in place of a field that there is not, or of a word that an enumeration does not have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from finetune_cli.corrections.counts import EPOCHS, STEPS, is_at_most_0, values_of
from finetune_cli.corrections.other_tools import answer
from finetune_cli.corrections.proposals import proposals
from finetune_cli.corrections.reasons import REFUSED_WORDS, accepted_words, listed
from finetune_cli.corrections.words import FORM_PRESETS, WORD_ANSWERS, WORDS
from finetune_cli.corrections.wrong_field import (
    Place,
    Proposal,
    WrongField,
    fields_of,
    letters,
    model_at,
    nearest,
    path_text,
    paths_of,
)
from finetune_job.api.job import FineTuneJob, FineTuneJobSpec

_SOURCE, _CLAIM, _STORAGE = ("source",), ("claimName",), ("volumeClaimTemplate", "storage")
_OTHER_WORKSPACE: Mapping[Place, Place] = {_CLAIM: _STORAGE, _STORAGE: _CLAIM}
"""A workspace is named or made, not both."""
_DATA_NAMES = dict.fromkeys(("path", "file", "files", "url", "uri", "location", "directory", "dataset", "name", "id"), _SOURCE)
_MEANT: Mapping[str, Mapping[str, Place]] = {
    "ModelSpec": dict.fromkeys(
        ("path", "repo", "repoid", "url", "uri", "location", "directory", "checkpoint", "base", "id", "name"), _SOURCE
    ),
    "DataSpec": _DATA_NAMES,
    "Dataset": _DATA_NAMES,
    "ValidationData": _DATA_NAMES,
    "OutputSpec": dict.fromkeys(
        ("path", "dir", "directory", "url", "uri", "location", "repo", "repoid", "name", "target"), ("destination",)
    ),
    "WorkspaceSpec": {
        **dict.fromkeys(("size", "storage", "capacity", "disk"), _STORAGE),
        **dict.fromkeys(("name", "claim", "pvc", "volume", "existingclaim"), _CLAIM),
    },
}
"""By model, and by name without its spelling: the field that is meant, if it is free. The most telling names first."""


def all_proposals(wrong: WrongField) -> Iterator[Proposal]:
    """For any wrong field, the likeliest first."""
    yield from _no_steps(wrong)
    match wrong.kind:
        case "extra_forbidden":
            yield from _unknown(wrong)
        case "enum" | "literal_error":
            yield from _words(wrong)
        case _:
            yield from proposals(wrong)


def _no_steps(wrong: WrongField) -> Iterator[Proposal]:
    """A number of steps by which transformers means that none is set: -1, its default, or another one that is not above 0."""
    is_steps = wrong.place[:1] == ("spec",) and letters(str(wrong.place[-1])) in STEPS and is_at_most_0(wrong.value)
    if wrong.model is not FineTuneJob or not is_steps:
        return
    has_epochs = any(True for _ in values_of(wrong.content["spec"], EPOCHS))
    length = "the length is spec.training.epochs" if has_epochs else "set spec.training.epochs, the passes over the data"
    reason = "" if wrong.kind == "extra_forbidden" else "is no number of steps"
    yield Proposal(
        f"leave it out: 0 and less mean that no steps are set; {length}", wrong.place, None, is_certain=True, message=reason
    )


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
    meant = _meant(holder.__name__, str(name), written) if holder is not None else None
    if meant is not None and meant[0] in free and _OTHER_WORKSPACE.get(meant, ("",))[0] not in written:
        yield _meant_field(wrong, parents, meant, written)
    if is_job:
        yield from _of_other_tool(wrong, str(name))
    near = nearest(str(name), free)
    if near is not None and near[1]:
        yield _renamed(wrong, (*parents, near[0]), f"write {near[0]}", is_certain=True)
    if is_job:
        yield from _elsewhere(wrong, str(name))
    if near is not None:
        yield _renamed(wrong, (*parents, near[0]), f"write {near[0]}", is_certain=False)
    taken = nearest(str(name), [each for each in allowed if each in written])
    if taken is not None and (near is None or taken[1]):
        reason = f"; {taken[0]} is written already"
    else:
        reason = "" if near is not None else f"; allowed here: {', '.join(sorted(allowed))}"
    yield Proposal(f"remove {wrong.name}{reason}", wrong.place, None)


def _meant_field(wrong: WrongField, parents: Place, meant: Place, written: Mapping[str, Any]) -> Proposal:
    place = (*parents, *meant)
    other = next(
        (name for name in written if _MEANT["WorkspaceSpec"].get(letters(name)) == _OTHER_WORKSPACE.get(meant, ())), None
    )
    if other is None:
        return _renamed(wrong, place, f"write {path_text(place)}", is_certain=True)
    why = "if there is such a claim" if meant == _CLAIM else "if the claim is to be made"
    removed = (*parents, other)
    fix = f"write {path_text(place)} and remove {path_text(removed)}, {why}"
    return Proposal(fix, wrong.place, None, more=((place, wrong.value), (removed, None)))


def _meant(model: str, name: str, written: Mapping[str, Any]) -> Place | None:
    """None if another name that is written tells more of the same field."""
    names = _MEANT.get(model, {})
    meant = names.get(letters(name))
    others = {letters(each) for each in written}
    return meant if next((each for each in names if each in others and names[each] == meant), None) == letters(name) else None


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
    if wrong.place[0] == "spec":
        yield from _words_of_others(wrong, path, asked)
    for proposal in proposals(wrong):
        if proposal.value in REFUSED_WORDS:
            without = next(each for each in proposals(wrong) if each.value not in REFUSED_WORDS)
            accepted = _all_words(wrong).replace("'", "")
            yield replace(without, fix=f"write one of {accepted}; {proposal.value} is not supported", is_certain=False)
        elif proposal.value is None:
            yield replace(proposal, fix=f"write {_all_words(wrong)}")
        else:
            yield proposal


def _all_words(wrong: WrongField) -> str:
    words = accepted_words(wrong)
    text = listed(words, last="or one of")
    return text if text.endswith("'") else f"{text}, which `finetune explain {wrong.name}` lists"


def _words_of_others(wrong: WrongField, path: str, asked: str) -> Iterator[Proposal]:
    known = WORDS.get(path, {}).get(asked)
    if known is not None:
        yield Proposal(f"write {known}", wrong.place, known, is_certain=True)
    meant = WORD_ANSWERS.get(path, {}).get(asked)
    if meant is not None:
        fix = f"write {meant.word}: {meant.why}"
        yield Proposal(fix, wrong.place, meant.word, message=meant.reason, note=meant.why)
    preset = FORM_PRESETS.get(asked) if path == "data.format" else None
    place = (*wrong.place[:-1], "mapping", "preset")
    written = _at(wrong.content, place)
    if preset is not None and written is None:
        fix = f"write {preset[0]}, and {path_text(place)}: {preset[1]}"
        yield Proposal(fix, wrong.place, preset[0], is_certain=True, more=((place, preset[1]),))
    elif preset is not None and letters(str(written)) == letters(preset[1]):
        yield Proposal(f"write {preset[0]}", wrong.place, preset[0], is_certain=True)

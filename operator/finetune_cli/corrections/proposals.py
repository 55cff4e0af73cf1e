"""Proposals for fields that the schema refuses: words, and the change that a program can make.

`propose` answers with one proposal for each field. What it writes may be wrong in turn, such as a misspelt value under a misspelt
name; `one_pass` asks again then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal, InvalidOperation
from typing import Any

from pydantic import BaseModel

from finetune_cli.corrections.addresses import Use, likely_addresses, slug
from finetune_cli.corrections.foreign import EPOCHS, STEPS, answer, number, values_of
from finetune_cli.corrections.reasons import REFUSED_WORDS, accepted_words, is_form, listed
from finetune_cli.corrections.table import answer_to, names_of, table, words_of
from finetune_cli.corrections.wrong_field import (
    LONGEST_WORD,
    Place,
    WrongField,
    fields_of,
    inner_model,
    is_alike,
    letters,
    model_at,
    nearest,
    nested_text,
    path_text,
    paths_of,
    value_at,
)
from finetune_job.api.base import DESTINATION_PATTERN, HUB_NAME_PATTERN, SOURCE_PATTERN
from finetune_job.api.inputs import DataSpec
from finetune_job.api.job import FineTuneJob, FineTuneJobSpec
from finetune_job.rules.outputs.settings import WRITE_TOKEN_SECRET
from finetune_job.rules.rule import yaml_text
from finetune_job.rules.sources import NO_COMMIT

_RIVALS = {"epochs": "maxSteps", "maxSteps": "epochs", "claimName": "volumeClaimTemplate", "volumeClaimTemplate": "claimName"}
"""Fields of which a manifest has one."""
_COMMIT_NOTE = "a revision: the commit that the repository's page shows"


@dataclass(frozen=True)
class Proposal:
    """A way to repair a field."""

    fix: str
    """The repair in words."""
    value: Any = None
    """The new value of the field; None removes it."""
    is_certain: bool = False
    """Whether nothing else can have been meant, so that a program may make the change unasked."""
    more: tuple[tuple[Place, Any], ...] = ()
    """Further places and values."""
    message: str = ""
    """The reason, where the schema has no good words for it."""
    note: str = ""
    """A further step for the user."""

    @property
    def is_move(self) -> bool:
        """Whether the value goes to another place."""
        return self.value is None and any(value is not None for _, value in self.more)


def propose(wrong: WrongField, *, is_crowded: bool = False) -> Proposal:
    """The likeliest repair. is_crowded: whether other entries of the same list may be wrong, too."""
    if wrong.kind == "missing":
        return _missing(wrong)
    return next(_likely(wrong), None) or last_resort(wrong, is_crowded=is_crowded)


def last_resort(wrong: WrongField, *, is_crowded: bool = True) -> Proposal:
    """The field left out where that is possible, else an example."""
    if wrong.kind == "extra_forbidden":
        return Proposal(f"remove {wrong.name}{_allowed(wrong)}")
    advice = _hint(wrong) or "write another value"
    siblings = value_at(wrong.content, wrong.place[:-1])
    value = example(wrong.holder, wrong.key) if wrong.plain == wrong.place else None
    if value is not None and _RIVALS.get(wrong.key) not in siblings:
        return Proposal(f"{advice}, such as {nested_text(value)}{wrong.meaning}", value)
    if wrong.is_required:
        return Proposal(advice, wrong.value)
    if isinstance(siblings, list) and (is_crowded or len(siblings) == 1):
        return Proposal(f"{advice}, or remove {path_text(wrong.plain)}{wrong.meaning}", more=((wrong.plain, None),))
    return Proposal(f"{advice}, or remove {wrong.name}{wrong.meaning}")


def example(model: type[BaseModel] | None, alias: str) -> Any:
    """A value of a field that is accepted as it is; for a model, its own required fields. None: nobody can guess one."""
    written = None if model is None else table()["examples"].get(f"{model.__name__}.{alias}")
    inner = None if model is None or written is not None else inner_model(model, alias)
    if model is None or inner is None or not any(i.is_required() for i in model.model_fields.values() if i.alias == alias):
        return written
    needed = {
        info.alias or name: example(inner, info.alias or name) for name, info in inner.model_fields.items() if info.is_required()
    }
    return None if None in needed.values() else needed


def _likely(wrong: WrongField) -> Iterator[Proposal]:
    yield from _no_steps(wrong)
    if wrong.kind == "extra_forbidden":
        yield from _unknown(wrong)
    else:
        yield from _BY_KIND[wrong.kind](wrong) if wrong.kind in _BY_KIND else ()


def _set(value: Any, *, is_certain: bool = False, note: str = "", more: tuple[tuple[Place, Any], ...] = ()) -> Proposal:
    return Proposal(f"write {yaml_text(value)}" + (f", and {note}" if note else ""), value, is_certain, more, note=note)


# A field that is not there, or that there is not


def _missing(wrong: WrongField) -> Proposal:
    value = example(wrong.holder, wrong.key)
    is_certain = wrong.key in ("apiVersion", "kind")
    return Proposal(f"write {wrong.key}: {nested_text(value)}{wrong.meaning}", value, is_certain)


def _no_steps(wrong: WrongField) -> Iterator[Proposal]:
    """A number of steps by which transformers means that none is set: -1, its default, or another one that is not above 0."""
    steps = number(wrong.value)
    if wrong.model is FineTuneJob and letters(wrong.key) in names_of(STEPS) and steps is not None and steps <= 0:
        has_epochs = any(True for _ in values_of(wrong.content["spec"], names_of(EPOCHS)))
        length = "the length is spec.training.epochs" if has_epochs else "set spec.training.epochs, the passes over the data"
        reason = "" if wrong.kind == "extra_forbidden" else "is no number of steps"
        yield Proposal(f"leave it out: 0 and less mean that no steps are set; {length}", is_certain=True, message=reason)


def _unknown(wrong: WrongField) -> Iterator[Proposal]:
    """The right name of an unknown field, what another tool's setting is here, or its right place."""
    *parents, _ = wrong.place
    holder, siblings = model_at(wrong.model, wrong.place), value_at(wrong.content, tuple(parents))
    free = [each for each in fields_of(holder) if each not in siblings]
    near = nearest(wrong.key, free)
    if near is not None and letters(near[0]) == letters(wrong.key):
        yield _renamed(wrong, (*parents, near[0]), f"write {near[0]}")
    if holder is not None:
        yield from _other_name(wrong, holder.__name__, free)
    is_job = wrong.model is FineTuneJob and parents[:1] == ["spec"]
    if is_job:
        yield from _setting_of_another_tool(wrong)
    if near is not None and near[1]:
        yield _renamed(wrong, (*parents, near[0]), f"write {near[0]}")
    if is_job:
        yield from _elsewhere(wrong)
    if near is not None:
        yield _renamed(wrong, (*parents, near[0]), f"write {near[0]}", is_certain=False)


def _allowed(wrong: WrongField) -> str:
    siblings = value_at(wrong.content, wrong.place[:-1])
    allowed = fields_of(model_at(wrong.model, wrong.place))
    taken = nearest(wrong.key, [each for each in allowed if each in siblings])
    return f"; {taken[0]} is written already" if taken else f"; allowed here: {', '.join(sorted(allowed))}"


def _renamed(wrong: WrongField, place: Place, fix: str, *, is_certain: bool = True) -> Proposal:
    return Proposal(fix, is_certain=is_certain, more=((place, wrong.value),))


def _other_name(wrong: WrongField, model: str, free: list[str]) -> Iterator[Proposal]:
    """The field that the table has for a name in this part, if it is free and no other name is written that says more of it."""
    siblings = {letters(each): each for each in value_at(wrong.content, wrong.place[:-1])}
    meant = {path: [letters(name) for name in names.split()] for path, names in table()["names"].get(model, {}).items()}
    path = next((path for path, names in meant.items() if letters(wrong.key) in names), None)
    if path is None or path.partition(".")[0] not in free:
        return
    if next(name for name in meant[path] if name in siblings) != letters(wrong.key):
        return
    place = (*wrong.place[:-1], *path.split("."))
    if model != "WorkspaceSpec":
        yield _renamed(wrong, place, f"write {path_text(place)}")
        return
    # A workspace is named or made, not both.
    (other,) = (each for each in meant if each != path)
    if other.partition(".")[0] not in free:
        return
    rival = next((siblings[name] for name in meant[other] if name in siblings), None)
    if rival is None:
        yield _renamed(wrong, place, f"write {path_text(place)}")
        return
    why = "if there is such a claim" if path == "claimName" else "if the claim is to be made"
    removed = (*wrong.place[:-1], rival)
    fix = f"write {path_text(place)} and remove {path_text(removed)}, {why}"
    yield Proposal(fix, more=((place, wrong.value), (removed, None)))


def _setting_of_another_tool(wrong: WrongField) -> Iterator[Proposal]:
    equivalent = answer(wrong.key, wrong.value, wrong.content["spec"])
    if equivalent is None:
        return
    places = {("spec", *path.split(".")): value for path, value in equivalent.changes.items()}
    taken = [place for place in places if value_at(wrong.content, place) is not None]
    if not taken:
        yield Proposal(equivalent.fix, is_certain=equivalent.is_certain, more=tuple(places.items()))
        return
    is_same = equivalent.is_certain and all(is_alike(value_at(wrong.content, place), places[place]) for place in places)
    if is_same:
        written = f"{path_text(taken[0])}: {yaml_text(places[taken[0]])}"
        yield Proposal(f"remove it: {written} is written already", is_certain=True)
    else:
        yield Proposal(f"remove it, or {equivalent.fix}: {path_text(taken[0])} is written already")


def _elsewhere(wrong: WrongField) -> Iterator[Proposal]:
    """A field of this name in another part of the spec, if there is only one."""
    paths = [path for path in paths_of(FineTuneJobSpec) if letters(str(path[-1])) == letters(wrong.key)]
    if len(paths) == 1 and value_at(wrong.content, ("spec", *paths[0])) is None:
        place = ("spec", *paths[0])
        yield _renamed(wrong, place, f"write {path_text(place)}")


# A value of another type


def _number(wrong: WrongField) -> Iterator[Proposal]:
    text = wrong.value.strip().replace("_", "").replace(",", "") if isinstance(wrong.value, str) else str(wrong.value)
    if isinstance(wrong.value, bool) or len(text) > LONGEST_WORD:
        return
    try:
        parsed = Decimal(text)
    except InvalidOperation:
        return
    if parsed.is_finite() and parsed.adjusted() < 19:
        whole = int(parsed.to_integral_value(ROUND_CEILING))
        yield Proposal(f"write {whole}, a whole number without quotes", whole, is_certain=whole == parsed)


_YES, _NO = ("true", "yes", "on", "y", "1", "enabled"), ("false", "no", "off", "n", "0", "disabled")


def _truth(wrong: WrongField) -> Iterator[Proposal]:
    word = str(wrong.value).strip().lower()
    if word in (*_YES, *_NO):
        yield Proposal(f"write {str(word in _YES).lower()}, without quotes", word in _YES, is_certain=True)


def _text(wrong: WrongField) -> Iterator[Proposal]:
    value = wrong.value
    if isinstance(value, bool | int | float):
        text = json.dumps(value)
        yield Proposal(f'put the value in quotes: "{text}"', text, is_certain=True)
    elif isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        yield Proposal(f"write {yaml_text(value[0])}, not a list", value[0], is_certain=True)
    elif wrong.holder is DataSpec and wrong.key == "source" and value and _is_list_of(str, value):
        yield _data_sets(wrong)


def _data_sets(wrong: WrongField) -> Proposal:
    """Several sources of training data where one is taken: write them behind those that are in `datasets` already."""
    place = (*wrong.place[:-1], "datasets")
    written = value_at(wrong.content, place)
    before = written if isinstance(written, list) else [] if written is None else [written]
    sources: list[dict[str, Any]] = []
    notes: dict[str, None] = {}
    for text in wrong.value:
        likely = () if is_form(SOURCE_PATTERN, text) else likely_addresses(text, "data")
        address = next((each for each in likely if is_form(SOURCE_PATTERN, each.text)), None)
        is_hub = address is not None and address.text.startswith("hf://")
        sources.append({"source": address.text if address else text, **({"revision": NO_COMMIT} if is_hub else {})})
        if address is not None:
            notes[_COMMIT_NOTE if is_hub else address.note] = None
    shown = ", ".join(map(nested_text, sources))
    fix = f"add {shown} to {path_text(place)}" if before else f"write {path_text(place)}: [{shown}]"
    return Proposal(
        ", and ".join([fix, *filter(None, notes)]),
        is_certain=written is None and not any(notes),
        more=((place, [*before, *sources]),),
        message="is a list, not one address",
    )


def _list(wrong: WrongField) -> Iterator[Proposal]:
    if isinstance(wrong.value, str):
        items = [item for item in re.split(r"[\s,\[\]\"']+", wrong.value) if item]
        yield Proposal(f"write [{', '.join(items)}]", items, is_certain=True, message="is a text, not a list")
    elif isinstance(wrong.value, dict | int | float):
        yield Proposal(f"write a list: [{nested_text(wrong.value)}]", [wrong.value])


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


def _mapping(wrong: WrongField) -> Iterator[Proposal]:
    inner = model_at(wrong.model, (*wrong.place, ""))
    main = table()["main"].get(inner.__name__) if inner is not None else None
    if main is not None and isinstance(wrong.value, str | int) and not isinstance(wrong.value, bool):
        shown = f"{{{main}: {nested_text(wrong.value)}}}"
        yield Proposal(f"write a mapping of fields to values: {shown}", {main: wrong.value}, is_certain=True)
    if wrong.value and _is_list_of(dict, wrong.value):
        merged = {key: item for each in wrong.value for key, item in each.items()}
        yield Proposal("write a mapping of fields to values, without dashes", merged)


# A value of the right type that is not allowed


def _word(wrong: WrongField) -> Iterator[Proposal]:
    """Our word for another tool's, the nearest one, or the list of all."""
    path, written = ".".join(map(str, wrong.place[1:])), str(wrong.value).lower()
    if wrong.place[0] == "spec":
        yield from _word_of_another_tool(wrong, path, written)
    near = nearest(wrong.value, re.findall(r"'([^']*)'", str(wrong.context.get("expected"))))
    if near is not None and near[0] not in REFUSED_WORDS:
        yield _set(near[0], is_certain=near[1])
    listing = listed(accepted_words(wrong), last="or one of")
    fix = f"write {listing}" + ("" if listing[-1] == "'" else f", which `finetune explain {wrong.name}` lists")
    if near is not None:
        fix = f"write one of {listing}; {near[0]} is not supported".replace("'", "")
    yield Proposal(fix, example(wrong.holder, wrong.key) if wrong.is_required else None)


def _word_of_another_tool(wrong: WrongField, path: str, written: str) -> Iterator[Proposal]:
    same = words_of(path).get(letters(written))
    if same is not None and same not in REFUSED_WORDS:
        yield Proposal(f"write {same}", same, is_certain=True)
    meant = answer_to(path, written)
    if meant is not None:
        fix = f"write {meant['write']}: {meant['why']}"
        yield Proposal(fix, meant["write"], message=meant.get("reason", ""), note=meant["why"])
    form: Mapping[str, str] | None = table()["presets"].get(letters(written)) if path == "data.format" else None
    if form is None:
        return
    place = (*wrong.place[:-1], "mapping", "preset")
    preset = value_at(wrong.content, place)
    if preset is None:
        fix = f"write {form['format']}, and {path_text(place)}: {form['preset']}"
        yield Proposal(fix, form["format"], is_certain=True, more=((place, form["preset"]),))
    elif letters(str(preset)) == letters(form["preset"]):
        yield Proposal(f"write {form['format']}", form["format"], is_certain=True)


_PLACES: dict[str, Use] = {SOURCE_PATTERN: "data", DESTINATION_PATTERN: "output"}


def _pattern(wrong: WrongField) -> Iterator[Proposal]:
    pattern = str(wrong.context.get("pattern"))
    text = wrong.value if isinstance(wrong.value, str) else ""

    def fits(value: str) -> bool:
        return is_form(pattern, value)

    if pattern in _PLACES:
        yield from _address(wrong, text, fits)
    elif "Gi" in pattern:
        yield from (_set(size, is_certain=sure) for size, sure in _sizes(text, fits))
    elif wrong.key == "revision":
        source = value_at(wrong.content, (*wrong.place[:-1], "source"))
        if isinstance(source, str) and source.startswith("hf://"):
            yield _set(NO_COMMIT, note="put the commit in its place")
        else:
            yield Proposal("leave it out: only an hf:// source has commits")
    elif pattern != HUB_NAME_PATTERN:
        candidates = dict.fromkeys((text.strip(), slug(text, "."), slug(text), re.sub(r"[^A-Za-z0-9_-]+", "-", text)[:63]))
        yield from (_set(each, is_certain=True) for each in candidates if fits(each))


_UNITS = {"": "G", "b": ""} | {f"{letter}{end}".lower(): letter for letter in "KMGT" for end in ("", "b", "i", "ib")}


def _sizes(text: str, fits: Callable[[str], bool]) -> Iterator[tuple[str, bool]]:
    """Sizes of the same number and about the same unit; certain if there was a unit at all."""
    parts = re.fullmatch(r"\s*([0-9]{1,10})(?:\.([0-9]{1,3}))?\s*([A-Za-z]{0,3})\s*", text)
    if parts is None or parts[3].lower() not in _UNITS:
        return
    amount, fraction, unit = int(parts[1]), parts[2] or "", _UNITS[parts[3].lower()]
    lower = {"T": "G", "G": "M", "M": "K"}.get(unit)
    if not fraction.strip("0"):
        binary, decimal = f"{amount}{unit}i", [f"{amount}{unit}B", f"{amount}{unit}"]
        spelt = [binary, *decimal] if "i" in parts[3].lower() or not parts[3] else [*decimal, binary]
    else:
        spelt = [f"{-(-1024 * int(parts[1] + fraction) // 10 ** len(fraction))}{lower}i"] if lower else []
    yield from ((size, bool(parts[3])) for size in spelt if fits(size))


def _address(wrong: WrongField, text: str, fits: Callable[[str], bool]) -> Iterator[Proposal]:
    use: Use = "model" if wrong.place[-2:-1] == ("model",) else _PLACES[str(wrong.context.get("pattern"))]
    for address in likely_addresses(text, use):
        if fits(address.text):
            # An address of the Hub needs a commit to read, or a token to write.
            name, value = ("secretRef", {"name": WRITE_TOKEN_SECRET}) if use == "output" else ("revision", NO_COMMIT)
            place = (*wrong.place[:-1], name)
            is_short = address.text.startswith("hf://") and value_at(wrong.content, place) is None
            note = "a secretRef with a write token" if use == "output" else _COMMIT_NOTE
            more = ((place, value),) if is_short else ()
            is_certain = address.is_certain and not more
            yield _set(address.text, is_certain=is_certain, note=note if is_short else address.note, more=more)
    yield _set(example(wrong.holder, wrong.key), note="the claim and the path that hold it")


_LIMITS = {"greater_than_equal": "ge", "less_than_equal": "le", "greater_than": "gt", "less_than": "lt"}


def _range(wrong: WrongField) -> Iterator[Proposal]:
    limit = wrong.context.get(_LIMITS[wrong.kind])
    fields = wrong.holder.model_fields.values() if wrong.holder is not None else ()
    is_below = wrong.kind.startswith("greater")
    usual = next((info.default for info in fields if info.alias == wrong.place[-1]), None) if is_below else None
    usual = usual if is_below else example(wrong.holder, wrong.key)
    value = usual if isinstance(usual, int) and not isinstance(usual, bool) else limit
    message = f"is {'below' if is_below else 'above'} {limit}, the {'least' if is_below else 'most'} that is allowed"
    if isinstance(value, int):
        yield Proposal(f"write {value}{wrong.meaning}", value, message=message)


def _own_words(wrong: WrongField) -> Iterator[Proposal]:
    """Answer a refusal of the models' own validators, which have a reason and a fix in words."""
    reason, _, fix = str(wrong.context.get("error")).partition("; ")
    value = wrong.value
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield Proposal(fix, json.dumps(value), is_certain=True, message=reason)
    if isinstance(value, str):
        respelt = value.strip().removeprefix("+").rstrip(".")
        respelt = f"0{respelt}" if respelt.startswith(".") else respelt.replace("_", "")
        if respelt != value:
            yield Proposal(f'{fix}: "{respelt}"', respelt, is_certain=True, message=reason)
        if "://" in value:
            use: Use = "output" if wrong.key == "destination" else "model" if wrong.place[-2:-1] == ("model",) else "data"
            yield from (Proposal(f"{fix}: {each.text}", each.text, message=reason) for each in likely_addresses(value, use))


def _shorter(wrong: WrongField) -> Iterator[Proposal]:
    most = wrong.context.get("max_length")
    if isinstance(most, int) and isinstance(wrong.value, str | list):
        unit = "characters" if isinstance(wrong.value, str) else "entries"
        yield Proposal(f"shorten it to {most} {unit}", wrong.value[:most])


def _hint(wrong: WrongField) -> str:
    if wrong.kind == "string_type" and isinstance(wrong.value, list | dict):
        return f"write one text, not a {'list' if isinstance(wrong.value, list) else 'mapping'}"
    if wrong.context.get("pattern") == HUB_NAME_PATTERN:
        return "write <org>/<name>"
    return _TYPE_WORDS.get(wrong.kind) or str(wrong.context.get("error", "")).partition("; ")[2]


_TYPE_WORDS = {
    "int_type": "write a whole number, without quotes",
    "int_from_float": "write a whole number",
    "bool_type": "write true or false, without quotes",
    "string_type": "put the value in quotes",
    "list_type": "write a list, as in [a, b]",
    "dict_type": "write a mapping of keys to values",
    "model_type": "write a mapping of fields to values",
}
_BY_KIND: dict[str, Callable[[WrongField], Iterator[Proposal]]] = {
    "int_type": _number,
    "int_from_float": _number,
    "bool_type": _truth,
    "string_type": _text,
    "list_type": _list,
    "model_type": _mapping,
    "dict_type": _mapping,
    "enum": _word,
    "literal_error": _word,
    "string_pattern_mismatch": _pattern,
    "value_error": _own_words,
    **dict.fromkeys(_LIMITS, _range),
    "string_too_long": _shorter,
    "too_long": _shorter,
}

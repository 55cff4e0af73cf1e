"""Says why the schema refuses a field, and proposes repairs: a fix in words, and the edits that a program can make.

The value that a proposal writes may itself be wrong, like a misspelt value under a misspelt name; `one_pass` then asks again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from decimal import ROUND_CEILING, Decimal, InvalidOperation
from typing import Annotated, Any, Literal

from pydantic import BaseModel, StringConstraints, TypeAdapter, ValidationError

from finetune_cli.corrections.foreign import EPOCHS, STEPS, answer, answer_to, names_of, number, table, values_of, words_of
from finetune_cli.corrections.wrong_field import (
    LONGEST_WORD,
    Place,
    Proposal,
    WrongField,
    fields_of,
    inner_model,
    is_alike,
    letters,
    model_at,
    nearest,
    nested_text,
    path_text,
    value_at,
)
from finetune_job.api.base import DESTINATION_PATTERN, HUB_DATASETS, HUB_NAME_PATTERN, SOURCE_PATTERN
from finetune_job.api.inputs import DataSpec
from finetune_job.api.job import FineTuneJob
from finetune_job.fields import all_fields
from finetune_job.methods import METHODS
from finetune_job.names import JOB_KIND
from finetune_job.rules.method_configuration.lora import REFUSED_INITS
from finetune_job.rules.outputs.settings import WRITE_TOKEN_SECRET
from finetune_job.rules.rule import yaml_text
from finetune_job.rules.sources import NO_COMMIT

_RIVALS = {"claimName": "volumeClaimTemplate", "volumeClaimTemplate": "claimName"}
"""Pairs of fields that exclude each other."""
REFUSED_WORDS = frozenset({*map(str, REFUSED_INITS), *(str(kind) for kind, method in METHODS.items() if method.refused)})
"""Values that the schema accepts only so that a rule can say why they are refused; no correction proposes them."""
_MOST_LISTED = 12
_FIRST_LISTED = 5
_ADDRESS = "is not an address: pvc://<claim>/<path> is a path on a volume, s3://<bucket>/<prefix> a bucket, "
_FORMS = {
    SOURCE_PATTERN: f"{_ADDRESS}hf://<org>/<name> a repository",
    DESTINATION_PATTERN: f"{_ADDRESS}hf://<org>/<model> a repository, oci://<registry>/<repository>:<tag> an image registry",
    HUB_NAME_PATTERN: "is not the name of a repository, which has two parts: <org>/<name>",
}
"""Pattern -> the reason why a string that does not match it is refused."""


def reason_of(wrong: WrongField) -> str:
    """Say why the schema refuses a field."""
    match wrong.kind:
        case "extra_forbidden":
            return "there is no such field"
        case "missing":
            return "is required"
        case "enum" | "literal_error":
            return f"is not one of {listed(accepted_words(wrong), last='and')}"
        case "value_error":
            return str(wrong.context.get("error")).partition("; ")[0]
        case "string_pattern_mismatch":
            form = _form(wrong)
            return form if wrong.value != "" else f"is empty: it {form}" if form.startswith("may") else "is empty"
        case _:
            return wrong.message.removeprefix("Input ")


def _form(wrong: WrongField) -> str:
    pattern = str(wrong.context.get("pattern"))
    if pattern in _FORMS:
        return _FORMS[pattern]
    if "Gi" in pattern:
        return "is not a size in the form that this field takes"
    if wrong.place[-1] == "revision":
        return (
            "is not a commit: branches and tags move, so a revision has the 40 digits of a commit, which the repository's page "
            "shows"
        )
    if not is_form(pattern, "a-1"):
        return "is not written in the form that this field takes"
    letters = "letters" if is_form(pattern, "A-1") else "lower-case letters"
    return f"may contain {letters}, digits and dashes, and must begin and end with a letter or digit"


def propose(wrong: WrongField) -> Proposal:
    """Return the likeliest repair; without one, return advice in words."""
    return _no_steps(wrong) or next(_BY_KIND.get(wrong.kind, _advice)(wrong), None) or next(_advice(wrong))


def example(model: type[BaseModel] | None, alias: str) -> Any:
    """Return an accepted value of a field; for a model, its required fields. None means that there is no example."""
    written = None if model is None else table()["examples"].get(f"{model.__name__}.{alias}")
    inner = None if model is None or written is not None else inner_model(model, alias)
    if inner is None:
        return written
    names = [info.alias or name for name, info in inner.model_fields.items() if info.is_required()]
    needed = {name: example(inner, name) for name in names}
    return None if None in needed.values() else needed


def accepted_words(wrong: WrongField) -> list[str]:
    """Return the words that the field's enumeration accepts and no rule refuses."""
    return [word for word in re.findall(r"'([^']*)'", str(wrong.context.get("expected"))) if word not in REFUSED_WORDS]


def listed(words: Sequence[str], *, last: str) -> str:
    """List words in quotes; if there are many, only the first few, and then the word `last` and the number of the others."""
    quoted = [f"'{word}'" for word in words]
    if len(words) > _MOST_LISTED:
        return f"{', '.join(quoted[:_FIRST_LISTED])} {last} {len(words) - _FIRST_LISTED} others"
    *first, end = quoted
    return f"{', '.join(first)} or {end}" if first else end


def is_form(pattern: str, text: str) -> bool:
    """Whether a string matches a pattern of the schema, according to the schema's own validator."""
    try:
        TypeAdapter(Annotated[str, StringConstraints(pattern=pattern)]).validate_python(text)
    except ValidationError:
        return False
    return True


def _advice(wrong: WrongField) -> Iterator[Proposal]:
    error, pattern, most = str(wrong.context.get("error", "")), wrong.context.get("pattern"), wrong.context.get("max_length")
    if wrong.holder is DataSpec and wrong.key == "source" and isinstance(wrong.value, list):
        advice = "write one address here, or a list of sources in spec.data.datasets"
    elif most is not None:
        advice = f"shorten it to {most} {'characters' if isinstance(wrong.value, str) else 'entries'}"
    elif pattern == HUB_NAME_PATTERN:
        advice = "write <org>/<name>"
    elif pattern in _USES:
        advice = "write an address in one of these forms"
    else:
        advice = _TYPE_WORDS.get(wrong.kind) or error.partition("; ")[2] or f"write another value{wrong.meaning}"
    yield Proposal(advice)


def _write(
    wrong: WrongField, value: Any, fix: str = "", *, is_certain: bool = False, more: tuple[tuple[Place, Any], ...] = ()
) -> Proposal:
    return Proposal(fix or f"write {yaml_text(value)}", ((wrong.place, value), *more), is_certain)


def _move(wrong: WrongField, place: Place, value: Any, *, is_certain: bool = True) -> Proposal:
    """Move the value to another place. The fix calls a sibling field by its name, and any other place by its path."""
    name = str(place[-1]) if place[:-1] == wrong.place[:-1] else path_text(place)
    return Proposal(f"write {name}", ((wrong.place, None), (place, value)), is_certain)


# A field that is missing or unknown


def _missing(wrong: WrongField) -> Iterator[Proposal]:
    value = example(wrong.holder, wrong.key)
    fix = f"write {wrong.key}: {nested_text(value)}{wrong.meaning}"
    yield _write(wrong, value, fix, is_certain=wrong.key in ("apiVersion", "kind"))


def _no_steps(wrong: WrongField) -> Proposal | None:
    """Propose to leave out a number of steps of 0 or less: the default of transformers is -1, which means no limit."""
    steps = number(wrong.value)
    if wrong.model is not FineTuneJob or letters(wrong.key) not in names_of(STEPS) or steps is None or steps > 0:
        return None
    has_epochs = any(True for _ in values_of(wrong.content["spec"], names_of(EPOCHS)))
    length = "the length is spec.training.epochs" if has_epochs else "set spec.training.epochs, the passes over the data"
    fix = f"leave it out: 0 and less mean that no steps are set; {length}"
    message = "" if wrong.kind == "extra_forbidden" else "is not a number of steps"
    return Proposal(fix, ((wrong.place, None),), is_certain=True, message=message)


def _unknown(wrong: WrongField) -> Iterator[Proposal]:
    """Yield the right name of an unknown field, the equivalent of another tool's setting, or the field's right place."""
    *parents, _ = wrong.place
    holder, siblings = model_at(wrong.model, wrong.place), value_at(wrong.content, tuple(parents))
    free = [name for name in fields_of(holder) if name not in siblings and _RIVALS.get(name) not in siblings]
    near = nearest(wrong.key, free)
    if near is not None and letters(near[0]) == letters(wrong.key):
        yield _move(wrong, (*parents, near[0]), wrong.value)
    if holder is not None:
        yield from _other_name(wrong, holder.__name__, free)
    is_job = wrong.model is FineTuneJob and parents[:1] == ["spec"]
    if is_job:
        yield from _setting_of_another_tool(wrong)
    if near is not None and near[1]:
        yield _move(wrong, (*parents, near[0]), wrong.value)
    if is_job:
        # Propose the field of this name in another part of the spec, if there is exactly one.
        paths = [
            field.path
            for field in all_fields()
            if field.kind == JOB_KIND and "[" not in field.path and field.path.startswith("spec.")
        ]
        places = [tuple(path.split(".")) for path in paths if letters(path.rpartition(".")[2]) == letters(wrong.key)]
        if len(places) == 1 and value_at(wrong.content, places[0]) is None:
            yield _move(wrong, places[0], wrong.value)
    if near is not None:
        yield _move(wrong, (*parents, near[0]), wrong.value, is_certain=False)
    taken = nearest(wrong.key, [name for name in fields_of(holder) if name in siblings])
    allowed = f"{taken[0]} is written already" if taken else f"allowed here: {', '.join(sorted(fields_of(holder)))}"
    yield Proposal(f"remove {wrong.name}; {allowed}", ((wrong.place, None),))


def _other_name(wrong: WrongField, model: str, free: list[str]) -> Iterator[Proposal]:
    """Yield the field for which the table lists this name, unless the field, or a name listed before this one, is present."""
    siblings = {letters(name) for name in value_at(wrong.content, wrong.place[:-1])}
    for path, text in table()["names"].get(model, {}).items():
        names = [letters(name) for name in text.split()]
        if next((name for name in names if name in siblings), None) == letters(wrong.key) and path.partition(".")[0] in free:
            place = (*wrong.place[:-1], *path.split("."))
            yield Proposal(f"write {path_text(place)}", ((wrong.place, None), (place, wrong.value)), is_certain=True)


def _setting_of_another_tool(wrong: WrongField) -> Iterator[Proposal]:
    proposal = answer(wrong.key, wrong.value, wrong.content["spec"])
    if proposal is None:
        return
    taken = [(place, value) for place, value in proposal.edits if value_at(wrong.content, place) is not None]
    removal = (wrong.place, None)
    if not taken:
        yield replace(proposal, edits=(removal, *proposal.edits))
    elif proposal.is_certain and all(is_alike(value_at(wrong.content, place), value) for place, value in proposal.edits):
        place, value = taken[0]
        yield Proposal(f"remove it: {path_text(place)}: {yaml_text(value)} is written already", (removal,), is_certain=True)
    else:
        yield Proposal(f"remove it, or {proposal.fix}: {path_text(taken[0][0])} is written already", (removal,))


# A value of the wrong type

_YES, _NO = ("true", "yes", "on", "y", "1", "enabled"), ("false", "no", "off", "n", "0", "disabled")


def _retyped(wrong: WrongField) -> Iterator[Proposal]:
    """Yield the value converted to the type of the field."""
    value = wrong.value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match wrong.kind, value:
        case "bool_type", _:
            word = str(value).strip().lower()
            if word in (*_YES, *_NO):
                yield _write(wrong, word in _YES, f"write {str(word in _YES).lower()}, without quotes", is_certain=True)
        case "string_type", bool() | int() | float():
            text = json.dumps(value)
            yield _write(wrong, text, f'put the value in quotes: "{text}"', is_certain=True)
        case "string_type", [str(only)]:
            yield _write(wrong, only, f"write {yaml_text(only)}, not a list", is_certain=True)
        case "list_type", str():
            items = [item for item in re.split(r"[\s,\[\]\"']+", value) if item]
            fix = f"write [{', '.join(items)}]"
            yield Proposal(fix, ((wrong.place, items),), is_certain=True, message="is a string, not a list")
        case "list_type", dict() | int() | float():
            yield _write(wrong, [value], f"write a list: [{nested_text(value)}]")
        case "model_type" | "dict_type", str() | int() if not isinstance(value, bool):
            inner = model_at(wrong.model, (*wrong.place, ""))
            main = table()["main"].get(inner.__name__) if inner is not None else None
            if main is not None:
                fix = f"write a mapping of fields to values: {{{main}: {nested_text(value)}}}"
                yield _write(wrong, {main: value}, fix, is_certain=True)
        case "value_error", _ if is_number:
            # The models' own validators say in words that a number has to be put in quotes.
            reason, _, fix = str(wrong.context.get("error")).partition("; ")
            yield Proposal(fix, ((wrong.place, json.dumps(value)),), is_certain=True, message=reason)
        case "int_type" | "int_from_float", _ if not isinstance(value, bool):
            text = value.strip().replace("_", "").replace(",", "") if isinstance(value, str) else str(value)
            with suppress(InvalidOperation):
                parsed = Decimal(text) if len(text) <= LONGEST_WORD else Decimal("nan")
                if parsed.is_finite() and parsed.adjusted() < 19:
                    whole = int(parsed.to_integral_value(ROUND_CEILING))
                    yield _write(wrong, whole, f"write {whole}, a whole number without quotes", is_certain=whole == parsed)


# A value of the right type that is not allowed


def _word(wrong: WrongField) -> Iterator[Proposal]:
    """Yield our word for another tool's word, the nearest of our words, or the list of all."""
    path, written = ".".join(map(str, wrong.place[1:])), str(wrong.value).lower()
    if wrong.place[0] == "spec":
        yield from _word_of_another_tool(wrong, path, written)
    near = nearest(wrong.value, re.findall(r"'([^']*)'", str(wrong.context.get("expected"))))
    if near is not None and near[0] not in REFUSED_WORDS:
        yield _write(wrong, near[0], is_certain=near[1])
    listing = listed(accepted_words(wrong), last="or one of")
    if near is not None:
        yield Proposal(f"write one of {listing}; {near[0]} is not supported".replace("'", ""))
    yield Proposal(f"write {listing}" + ("" if listing[-1] == "'" else f", which `finetune explain {wrong.name}` lists"))


def _word_of_another_tool(wrong: WrongField, path: str, written: str) -> Iterator[Proposal]:
    same = words_of(path).get(letters(written))
    if same is not None and same not in REFUSED_WORDS:
        yield _write(wrong, same, f"write {same}", is_certain=True)
    instead = answer_to(path, written)
    if instead is not None:
        fix = f"write {instead['write']}: {instead['why']}"
        yield Proposal(fix, ((wrong.place, instead["write"]),), message=instead.get("reason", ""))
    form = table()["presets"].get(letters(written)) if path == "data.format" else None
    place = (*wrong.place[:-1], "mapping", "preset")
    preset = value_at(wrong.content, place)
    if form is not None and preset is None:
        fix = f"write {form['format']}, and {path_text(place)}: {form['preset']}"
        yield _write(wrong, form["format"], fix, is_certain=True, more=((place, form["preset"]),))
    elif form is not None and letters(str(preset)) == letters(form["preset"]):
        yield _write(wrong, form["format"], is_certain=True)


Use = Literal["model", "data", "output"]
"""The purpose for which an address is used."""
_USES: dict[str, Use] = {SOURCE_PATTERN: "data", DESTINATION_PATTERN: "output"}
_USUAL_CLAIM: dict[Use, str] = {"model": "models", "data": "data", "output": "models-out"}
_HUB_LINK = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(.+)")
_HUB_BRANCH = re.compile(r"/(?:tree|blob|resolve)/[^/]+")
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_FILE = re.compile(r"\.(jsonl?|csv|tsv|parquet|txt|arrow|gz|safetensors)$", re.IGNORECASE)
_LONGEST_ADDRESS = 512
"""Maximum length of a text that is taken for an address."""


def _pattern(wrong: WrongField) -> Iterator[Proposal]:
    pattern = str(wrong.context.get("pattern"))
    text = wrong.value if isinstance(wrong.value, str) else ""
    if pattern in _USES:
        yield from _address(wrong, text, pattern)
    elif "Gi" in pattern:
        yield from (_write(wrong, size, is_certain=has_unit) for size, has_unit in _sizes(text) if is_form(pattern, size))
    elif wrong.key == "revision":
        source = value_at(wrong.content, (*wrong.place[:-1], "source"))
        if isinstance(source, str) and source.startswith("hf://"):
            yield _write(wrong, NO_COMMIT, f'write "{NO_COMMIT}", and put the commit in its place')
        else:
            yield _write(wrong, None, "leave it out: only an hf:// source has commits")
    elif pattern != HUB_NAME_PATTERN:
        candidates = (text.strip(), _slug(text), re.sub(r"[^A-Za-z0-9_-]+", "-", text)[:63])
        yield from (_write(wrong, name, is_certain=True) for name in candidates if is_form(pattern, name))


_UNITS = {"": "G", "b": ""} | {f"{letter}{end}".lower(): letter for letter in "KMGT" for end in ("", "b", "i", "ib")}


def _sizes(text: str) -> Iterator[tuple[str, bool]]:
    """Yield sizes with the number in the text and a similar unit, each with a flag: whether the text has a unit."""
    parts = re.fullmatch(r"\s*([0-9]{1,10})\s*([A-Za-z]{0,3})\s*", text)
    if parts is not None and parts[2].lower() in _UNITS:
        unit = _UNITS[parts[2].lower()]
        endings = ("i", "B", "") if "i" in parts[2].lower() or not parts[2] else ("B", "", "i")
        yield from ((f"{int(parts[1])}{unit}{ending}", bool(parts[2])) for ending in endings)


def _address(wrong: WrongField, written: str, pattern: str) -> Iterator[Proposal]:
    """Yield the likeliest address for a link, a repository's name on the Hub, or a path on this machine."""
    use: Use = "model" if wrong.place[-2:-1] == ("model",) else _USES[pattern]
    text, note, revision = written.strip().strip("\"'"), "", NO_COMMIT
    if not text or len(text) > _LONGEST_ADDRESS:
        return
    if (link := _HUB_LINK.match(text)) is not None:
        address = "hf://" + _HUB_BRANCH.sub("", link[1], count=1)
    elif use != "output" and _HUB_NAME.fullmatch(text) and not _FILE.search(text):
        address = f"hf://{HUB_DATASETS if use == 'data' else ''}{text}"
    elif text.startswith("hf://") and "@" in text:
        address, _, name = text.partition("@")
        revision = name if len(name) == len(NO_COMMIT) else NO_COMMIT
    elif "://" in text:
        return
    else:
        directory, slash, name = text.rstrip("/").rpartition("/")
        claim = _slug(directory.rpartition("/")[2]) or _USUAL_CLAIM[use]
        address, note = f"pvc://{claim}/{name}", f"give `finetune run` --claim {claim}={directory or slash or '.'}"
    if not is_form(pattern, address):
        return
    # Reading from a Hub address requires a commit, and writing to one requires a token.
    key, value = ("secretRef", {"name": WRITE_TOKEN_SECRET}) if use == "output" else ("revision", revision)
    place = (*wrong.place[:-1], key)
    is_incomplete = address.startswith("hf://") and value_at(wrong.content, place) is None
    if is_incomplete:
        note = "a secretRef with a write token" if use == "output" else "a revision: the commit that the repository's page shows"
    fix = f"write {yaml_text(address)}" + (f", and {note}" if note else "")
    yield _write(wrong, address, fix, more=((place, value),) if is_incomplete else (), is_certain=revision != NO_COMMIT)


def _slug(text: str) -> str:
    """Make a valid Kubernetes name: lower-case letters, digits and dashes, at most 63 characters."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:63].strip("-")


_LIMITS = {"greater_than_equal": "ge", "less_than_equal": "le", "greater_than": "gt", "less_than": "lt"}


def _range(wrong: WrongField) -> Iterator[Proposal]:
    limit = wrong.context.get(_LIMITS[wrong.kind])
    fields = wrong.holder.model_fields.values() if wrong.holder is not None else ()
    default = next((info.default for info in fields if info.alias == wrong.key), None)
    value = default if isinstance(default, int) and not isinstance(default, bool) else limit
    side, end = ("below", "least") if wrong.kind.startswith("greater") else ("above", "most")
    if isinstance(value, int):
        fix, message = f"write {value}{wrong.meaning}", f"is {side} {limit}, the {end} that is allowed"
        yield Proposal(fix, ((wrong.place, value),), message=message)


_TYPE_WORDS = {
    "int_type": "write a whole number, without quotes",
    "int_from_float": "write a whole number",
    "bool_type": "write true or false, without quotes",
    "string_type": "write one text, in quotes",
    "list_type": "write a list, as in [a, b]",
    "dict_type": "write a mapping of keys to values",
    "model_type": "write a mapping of fields to values",
}
_BY_KIND: dict[str, Callable[[WrongField], Iterator[Proposal]]] = {
    "extra_forbidden": _unknown,
    "missing": _missing,
    "enum": _word,
    "literal_error": _word,
    "string_pattern_mismatch": _pattern,
    "value_error": _retyped,
    **dict.fromkeys(_TYPE_WORDS, _retyped),
    **dict.fromkeys(_LIMITS, _range),
}

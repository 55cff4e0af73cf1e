"""What to write in place of a value that does not fit the schema: words, and the change that a program can make.

Each function proposes, the likeliest first; `manifest` takes the first proposal that the schema accepts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import ROUND_CEILING, Decimal, InvalidOperation
from typing import Any

from finetune_cli.corrections.addresses import Use, likely_addresses, slug
from finetune_cli.corrections.data_sets import COMMIT_NOTE, data_sets, names_several_sources
from finetune_cli.corrections.examples import example
from finetune_cli.corrections.reasons import is_form
from finetune_cli.corrections.sizes import likely_sizes
from finetune_cli.corrections.wrong_field import LONGEST_WORD, Proposal, WrongField, model_at, nearest, nested_text, path_text
from finetune_job.api.base import DESTINATION_PATTERN, HUB_NAME_PATTERN, SOURCE_PATTERN
from finetune_job.rules.outputs.settings import WRITE_TOKEN_SECRET
from finetune_job.rules.rule import yaml_text
from finetune_job.rules.sources import NO_COMMIT


def proposals(wrong: WrongField) -> Iterator[Proposal]:
    """For everything but an unknown field."""
    if wrong.kind == "missing":
        yield from _missing(wrong)
        return
    yield from _BY_KIND.get(wrong.kind, _none)(wrong)
    yield from _otherwise(wrong)


def _none(_wrong: WrongField) -> Iterator[Proposal]:
    return iter(())


def _set(wrong: WrongField, value: Any, *, is_certain: bool = False, note: str = "") -> Proposal:
    fix = f"write {yaml_text(value)}" + (f", and {note}" if note else "")
    return Proposal(fix, wrong.place, value, is_certain=is_certain, note=note)


# A field that is not there


def _missing(wrong: WrongField) -> Iterator[Proposal]:
    name = str(wrong.place[-1])
    value = None if wrong.holder is None else example(wrong.holder, name)
    meaning = f" ({wrong.meaning.rstrip('.')})" if wrong.meaning else ""
    if value is not None:
        certain = name in ("apiVersion", "kind")
        yield Proposal(f"write {name}: {nested_text(value)}{meaning}", wrong.place, value, is_certain=certain)


# A value of another type


def _number(wrong: WrongField) -> Iterator[Proposal]:
    text = wrong.value.strip().replace("_", "").replace(",", "") if isinstance(wrong.value, str) else str(wrong.value)
    if isinstance(wrong.value, bool) or len(text) > LONGEST_WORD:
        return
    try:
        number = Decimal(text)
    except InvalidOperation:
        return
    if number.is_finite() and number.adjusted() < 19:
        whole = int(number.to_integral_value(ROUND_CEILING))
        yield Proposal(f"write {whole}, a whole number without quotes", wrong.place, whole, is_certain=whole == number)


_YES, _NO = ("true", "yes", "on", "y", "1", "enabled"), ("false", "no", "off", "n", "0", "disabled")


def _truth(wrong: WrongField) -> Iterator[Proposal]:
    word = str(wrong.value).strip().lower()
    if word in (*_YES, *_NO):
        truth = word in _YES
        yield Proposal(f"write {str(truth).lower()}, without quotes", wrong.place, truth, is_certain=True)


def _text(wrong: WrongField) -> Iterator[Proposal]:
    if isinstance(wrong.value, bool | int | float):
        text = json.dumps(wrong.value)
        yield Proposal(f'put the value in quotes: "{text}"', wrong.place, text, is_certain=True)
    elif isinstance(wrong.value, list) and len(wrong.value) == 1 and isinstance(wrong.value[0], str):
        yield Proposal(f"write {yaml_text(wrong.value[0])}, not a list", wrong.place, wrong.value[0], is_certain=True)
    elif names_several_sources(wrong):
        yield data_sets(wrong)


def _list(wrong: WrongField) -> Iterator[Proposal]:
    if isinstance(wrong.value, str):
        items = [item for item in re.split(r"[\s,\[\]\"']+", wrong.value) if item]
        yield Proposal(f"write [{', '.join(items)}]", wrong.place, items, is_certain=True, message="is a text, not a list")
    elif isinstance(wrong.value, dict | int | float):
        yield Proposal(f"write a list: [{nested_text(wrong.value)}]", wrong.place, [wrong.value])


_MAIN_FIELD = {
    "ModelSpec": "source", "DataSpec": "source", "ValidationData": "source", "Dataset": "source", "MethodSpec": "type",
    "OutputSpec": "destination", "WorkspaceSpec": "claimName", "SecretKeyRef": "name", "SecretRef": "name", "LoraSpec": "r",
    "ObjectMeta": "name", "FsdpSpec": "version", "QuantizationSpec": "bits", "VolumeClaimTemplate": "storage",
    "EarlyStopping": "patience", "TrainingSpec": "epochs", "MixedPrecisionSpec": "paramDtype",
}  # fmt: skip
"""Of models: the field that a single value in their place is meant for."""


def _mapping(wrong: WrongField) -> Iterator[Proposal]:
    inner = model_at(wrong.model, (*wrong.place, ""))
    main = _MAIN_FIELD.get(inner.__name__) if inner is not None else None
    if main is not None and isinstance(wrong.value, str | int) and not isinstance(wrong.value, bool):
        value = {main: wrong.value}
        yield Proposal(
            f"write a mapping of fields to values: {{{main}: {nested_text(wrong.value)}}}", wrong.place, value, is_certain=True
        )
    if isinstance(wrong.value, list) and wrong.value and all(isinstance(one, dict) for one in wrong.value):
        merged = {key: item for one in wrong.value for key, item in one.items()}
        yield Proposal("write a mapping of fields to values, without dashes", wrong.place, merged)


# A value of the right type that is not allowed


def _word(wrong: WrongField) -> Iterator[Proposal]:
    words = re.findall(r"'([^']*)'", str(wrong.context.get("expected")))
    near = nearest(wrong.value, words)
    if near is not None:
        yield _set(wrong, near[0], is_certain=near[1])


_PLACES: dict[str, Use] = {SOURCE_PATTERN: "data", DESTINATION_PATTERN: "output"}


def _pattern(wrong: WrongField) -> Iterator[Proposal]:
    pattern = str(wrong.context.get("pattern"))
    text = wrong.value if isinstance(wrong.value, str) else ""

    def fits(value: str) -> bool:
        return is_form(pattern, value)

    if pattern in _PLACES:
        yield from _address(wrong, text, fits)
    elif "Gi" in pattern:
        yield from (_set(wrong, size, is_certain=sure) for size, sure in likely_sizes(text, fits))
    elif wrong.place[-1] == "revision":
        yield _set(wrong, NO_COMMIT, note="put the commit in its place")
    elif pattern != HUB_NAME_PATTERN:
        candidates = dict.fromkeys((text.strip(), slug(text, "."), slug(text), re.sub(r"[^A-Za-z0-9_-]+", "-", text)[:63]))
        yield from (_set(wrong, each, is_certain=True) for each in candidates if fits(each))


def _address(wrong: WrongField, text: str, fits: Callable[[str], bool]) -> Iterator[Proposal]:
    use: Use = "model" if wrong.place[-2:-1] == ("model",) else _PLACES[str(wrong.context.get("pattern"))]
    for address in likely_addresses(text, use):
        if not fits(address.text):
            continue
        more, note = _with_hub(wrong, use) if address.text.startswith("hf://") else ((), address.note)
        made = _set(wrong, address.text, is_certain=address.is_certain and not more, note=note)
        yield replace(made, more=more)
    if wrong.holder is not None:
        yield _set(wrong, example(wrong.holder, str(wrong.place[-1])), note="the claim and the path that hold it")


def _with_hub(wrong: WrongField, use: Use) -> tuple[tuple[tuple[tuple[int | str, ...], Any], ...], str]:
    """What an address of the Hub needs besides: a commit to read, a token to write."""
    name, value = ("secretRef", {"name": WRITE_TOKEN_SECRET}) if use == "output" else ("revision", NO_COMMIT)
    if wrong.siblings.get(name) is not None:
        return (), ""
    note = "a secretRef with a write token" if use == "output" else COMMIT_NOTE
    return (((*wrong.place[:-1], name), value),), note


_LIMITS = {"greater_than_equal": "ge", "less_than_equal": "le", "greater_than": "gt", "less_than": "lt"}


def _range(wrong: WrongField) -> Iterator[Proposal]:
    limit = wrong.context.get(_LIMITS[wrong.kind])
    default = _default(wrong)
    meaning = f" ({wrong.meaning.rstrip('.')})" if wrong.meaning else ""
    side = "below" if wrong.kind == "greater_than_equal" else "above"
    message = f"is {side} {limit}, the {'least' if side == 'below' else 'most'} that is allowed"
    usual = default if isinstance(default, int) and not isinstance(default, bool) else limit
    if side == "above":
        named = example(wrong.holder, str(wrong.place[-1])) if wrong.holder is not None else None
        usual = named if isinstance(named, int) else limit
    if isinstance(usual, int):
        yield Proposal(f"write {usual}{meaning}", wrong.place, usual, message=message)


def _default(wrong: WrongField) -> Any:
    if wrong.holder is None:
        return None
    return next((info.default for info in wrong.holder.model_fields.values() if info.alias == wrong.place[-1]), None)


def _own_words(wrong: WrongField) -> Iterator[Proposal]:
    """What the models' own validators refuse, with a reason and a fix in words."""
    reason, _, fix = str(wrong.context.get("error")).partition("; ")
    value = wrong.value
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield Proposal(fix, wrong.place, json.dumps(value), is_certain=True, message=reason)
        return
    if isinstance(value, str):
        respelt = value.strip().removeprefix("+").rstrip(".")
        respelt = f"0{respelt}" if respelt.startswith(".") else respelt.replace("_", "")
        if respelt != value:
            yield Proposal(f'{fix}: "{respelt}"', wrong.place, respelt, is_certain=True, message=reason)
        if "://" in value and wrong.holder is not None:
            use: Use = "output" if wrong.place[-1] == "destination" else "model" if wrong.place[-2:-1] == ("model",) else "data"
            for address in likely_addresses(value, use):
                yield Proposal(f"{fix}: {address.text}", wrong.place, address.text, message=reason)


def _shorter(wrong: WrongField) -> Iterator[Proposal]:
    most = wrong.context.get("max_length")
    if isinstance(most, int) and isinstance(wrong.value, str | list):
        unit = "characters" if isinstance(wrong.value, str) else "entries"
        yield Proposal(f"shorten it to {most} {unit}", wrong.place, wrong.value[:most])


def _otherwise(wrong: WrongField) -> Iterator[Proposal]:
    """The field left out where that is possible, else an example."""
    meaning = f" ({wrong.meaning.rstrip('.')})" if wrong.meaning else ""
    hint = _hint(wrong)
    value = example(wrong.holder, str(wrong.place[-1])) if wrong.holder is not None and wrong.plain == wrong.place else None
    if value is not None:
        yield Proposal(f"{hint or 'write another value'}, such as {nested_text(value)}{meaning}", wrong.place, value)
    if wrong.place and not wrong.is_required:
        yield Proposal(f"{hint or 'write another value'}, or remove {wrong.name}{meaning}", wrong.place, None)
        if wrong.plain != wrong.place:
            yield Proposal(f"remove {path_text(wrong.plain)}{meaning}", wrong.plain, None)


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

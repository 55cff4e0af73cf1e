"""Settings under the names of other tools, translated by the table: what to set here."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from finetune_cli.corrections.table import Row, names_of, rows, words_of
from finetune_cli.corrections.wrong_field import letters
from finetune_job.rules.rule import yaml_text

Spec = Mapping[str, Any]
STEPS, EPOCHS = "training.maxSteps", "training.epochs"
_TOTALS = ("globalbatchsize", "numprocesses", "worldsize", "numranks")
"""Numbers of all sequences or ranks; tools differ, some mean the ranks of one node."""
_MOST_COUNTED = 1_000_000
_USUAL_STEPS = 100
"""Steps between two checkpoints or evaluations, if their total is not known."""


@dataclass(frozen=True)
class Equivalent:
    """The equivalent of another tool's setting."""

    fix: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    """New values by path under `spec`; the foreign setting itself is removed in any case."""
    is_certain: bool = False
    """Whether it means the same here, so that a program may make the change unasked."""


def answer(name: str, value: Any, spec: Spec) -> Equivalent | None:
    """Translate a setting; None if no other tool is known to have it. spec: all that is written."""
    row = rows().get(letters(name))
    if row is None:
        return None
    match row.kind:
        case "removed":
            return Equivalent(f"remove it: {row.why}")
        case "switches":
            return _switch(row, value)
        case "worded":
            word = words_of(row.path).get(letters(str(value)))
            is_known = word is not None
            return Equivalent(f"write spec.{row.path}: {word or row.usual}{row.note}", {row.path: word or row.usual}, is_known)
        case "converted":
            return _CONVERSIONS[row.convert](row, value, spec)
        case _:
            return _same(row, value)


def answer_without_value(name: str) -> str:
    """Say in sentences what a setting is here whatever its value; empty if no other tool is known to have it."""
    row = rows().get(letters(name))
    if row is None or row.explain:
        return "" if row is None else row.explain
    values = row.example or ((True, False) if row.kind == "switches" else ())
    texts = [f"for {name}: {yaml_text(value)}, {_fix(name, value)}" for value in values] or [_fix(name, None)]
    return " ".join(f"{text[:1].upper()}{text[1:]}." for text in texts)


def _fix(name: str, value: Any) -> str:
    equivalent = answer(name, value, {})
    return "" if equivalent is None else equivalent.fix


def _same(row: Row, value: Any) -> Equivalent:
    return Equivalent(f"write spec.{row.path}", {row.path: value}, is_certain=True)


def _switch(row: Row, value: Any) -> Equivalent:
    if is_off(value) and row.off is None:
        return Equivalent(f"remove it: {row.unset}", is_certain=True)
    if is_off(value):
        return Equivalent(f"write spec.{row.path}: {yaml_text(row.off)}", {row.path: row.off}, row.off_is_certain)
    shown = f"[{', '.join(row.on)}]" if isinstance(row.on, list) else yaml_text(row.on)
    is_on = value is True or str(value).lower() == "true"
    fix = row.fix or f"write spec.{row.path}: {shown}{row.note}"
    return Equivalent(fix, {row.path: row.on, **dict(row.also)}, is_certain=is_on and row.certain)


def _batch(row: Row, value: Any, _spec: Spec) -> Equivalent:
    fix = (
        "write spec.training.globalBatchSize for the sequences of a step over all ranks, or spec.training.microBatchSize for "
        "those of one rank at a time"
    )
    return Equivalent(fix, {row.path: value})


def _accumulation(_row: Row, value: Any, spec: Spec) -> Equivalent:
    paths = ("training.microBatchSize", "parallelism.nodes", "parallelism.processesPerNode")
    micros, nodes, processes = ([count(each) for each in values_of(spec, names_of(path))] for path in paths)
    micro, steps = next(filter(None, micros), None), count(value)
    ranks = math.prod(next(filter(None, counts), 1) for counts in (nodes, processes))
    total = (micro or 1) * ranks * (steps or 1)
    is_clear = all(len({*counts}) < 2 and None not in counts for counts in (micros, nodes, processes, [steps]))
    has_total = any(True for _ in values_of(spec, _TOTALS))
    return Equivalent(
        f"write spec.training.globalBatchSize: {total} (microBatchSize {micro or 'unset, taken as 1'} x {ranks} "
        f"rank{'s' if ranks > 1 else ''} x {steps or 1} accumulated): accumulation follows from it",
        {"training.globalBatchSize": min(total, _MOST_COUNTED)},
        is_certain=micro is not None and is_clear and not has_total and total <= _MOST_COUNTED,
    )


def _trackers(_row: Row, value: Any, _spec: Spec) -> Equivalent:
    names = [str(each) for each in value] if isinstance(value, list) else [] if is_off(value) else [str(value)]
    names = [name for name in names if name.lower() not in ("none", "all")]
    if not names:
        return Equivalent("remove it: nothing is reported to a tracker unless spec.training.trackers names one", is_certain=True)
    return Equivalent(f"write spec.training.trackers: [{', '.join(names)}]", {"training.trackers": names}, is_certain=True)


def _wandb(row: Row, value: Any, spec: Spec) -> Equivalent:
    return _trackers(row, [] if is_off(value) else "wandb", spec)


def _tokens(row: Row, value: Any, _spec: Spec) -> Equivalent:
    """Translate a list of tokens, or a text with commas between them."""
    is_special = row.convert == "special_tokens"
    given = value if isinstance(value, list) else [] if is_off(value) else str(value).split(",")
    names = [str(each).strip() for each in given if str(each).strip()]
    tokens = [{"content": name, **({"special": True} if is_special else {})} for name in names]
    more = ", each with special: true" if is_special else ""
    fix = f"name them as content in spec.model.addedTokens{more}: their rows are trained"
    return Equivalent(fix, {"model.addedTokens": tokens} if tokens else {}, is_certain=True)


def _warmup(_row: Row, value: Any, spec: Spec) -> Equivalent:
    total, steps, share = _total_steps(spec), count(value), _share(value)
    path = "training.warmupRatio"
    if share is not None or is_off(value):
        written = f"{share or 0:g}"
        return Equivalent(f'write spec.{path}: "{written}"', {path: written}, is_certain=True)
    written = f"{min(steps / total, 0.99):.3g}" if total and steps else "0.03"
    return Equivalent(f'write spec.{path}: "{written}", a share of all steps', {path: written})


def _every(row: Row, value: Any, spec: Spec) -> Equivalent:
    """Translate a number of steps, which transformers also takes as a share of all of them."""
    share, total = _share(value), _total_steps(spec)
    if share is None:
        return _same(row, value)
    steps = max(round(share * total), 1) if total else _USUAL_STEPS
    return Equivalent(f"write spec.{row.path}: {steps}, a number of steps and no share of them", {row.path: steps})


def _targets(row: Row, value: Any, _spec: Spec) -> Equivalent:
    if str(value).strip().lower() in ("all", "all-linear"):
        return Equivalent(f"write spec.{row.path}: [all-linear]", {row.path: ["all-linear"]}, is_certain=True)
    return _same(row, value)


def _bits(_row: Row, value: Any, _spec: Spec) -> Equivalent:
    row = rows()["loadin8bit" if value == 8 else "loadin4bit"]
    return _switch(row, value if is_off(value) else True)


_CONVERSIONS: Mapping[str, Callable[[Row, Any, Spec], Equivalent]] = {
    "accumulation": _accumulation,
    "batch": _batch,
    "bits": _bits,
    "every": _every,
    "special_tokens": _tokens,
    "targets": _targets,
    "tokens": _tokens,
    "trackers": _trackers,
    "wandb": _wandb,
    "warmup": _warmup,
}


def is_off(value: Any) -> bool:
    """Whether a switch is off, in any spelling."""
    return value is False or str(value).strip().lower() in ("false", "no", "none", "null", "off", "0", "")


def values_of(written: Any, names: Container[str]) -> Iterator[Any]:
    """Yield what is written under these names in any part of a spec: settings are pasted anywhere."""
    for name, value in written.items() if isinstance(written, Mapping) else ():
        if isinstance(value, Mapping):
            yield from values_of(value, names)
        elif value is not None and letters(str(name)) in names:
            yield value


def number(value: Any) -> float | None:
    """A finite number, in quotes or not."""
    try:
        parsed = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        return None
    return parsed if math.isfinite(parsed) else None


def count(value: Any) -> int | None:
    """A whole number above 0, in quotes or not."""
    parsed = number(value)
    return int(parsed) if parsed is not None and 0 < parsed <= _MOST_COUNTED and parsed == int(parsed) else None


def _share(value: Any) -> float | None:
    """A number between 0 and 1, by which transformers means a part of all steps."""
    parsed = number(value)
    return parsed if parsed is not None and 0 < parsed < 1 else None


def _total_steps(spec: Spec) -> int | None:
    training = spec.get("training")
    return count(training.get("maxSteps")) if isinstance(training, Mapping) else None

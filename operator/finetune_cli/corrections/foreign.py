"""Translates settings of other tools, which foreign_settings.toml lists, into settings of a FineTuneJob."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Container, Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from finetune_cli.corrections.wrong_field import Proposal, letters
from finetune_job.fields import all_fields
from finetune_job.rules.rule import yaml_text

Spec = Mapping[str, Any]
Row = Mapping[str, Any]
"""A setting of other tools: its `kind` (the section of the table), its `names`, and its values in the table."""
STEPS, EPOCHS = "training.maxSteps", "training.epochs"
_TOTALS = ("globalbatchsize", "numprocesses", "worldsize", "numranks")
"""Foreign names for the number of all sequences or ranks. Tools differ: some mean the ranks of one node."""
_MOST_COUNTED = 1_000_000
_USUAL_STEPS = 100
"""Steps between two checkpoints or evaluations, if the total number of steps is not known."""


@cache
def table() -> dict[str, Any]:
    """Read the table."""
    return tomllib.loads(files("finetune_cli.corrections").joinpath("foreign_settings.toml").read_text())


@cache
def rows() -> Mapping[str, Row]:
    """Map each foreign name, normalized by `letters`, to its row."""
    by_name: dict[str, Row] = {}
    for kind in ("same", "removed", "switches", "worded", "converted"):
        for key, entry in table()[kind].items():
            row = {"same": {"path": entry}, "removed": {"why": entry}}.get(kind, entry)
            by_name |= {letters(name): {"kind": kind, "names": key.split(), **row} for name in key.split()}
    return by_name


def names_of(path: str) -> frozenset[str]:
    """Return the names of one of our fields, normalized by `letters`: those in other tools, and its own."""
    others = {
        letters(name) for row in rows().values() if (row["kind"], row.get("path")) == ("same", path) for name in row["names"]
    }
    return frozenset({letters(path.rpartition(".")[2]), *others})


@cache
def words_of(path: str) -> Mapping[str, str]:
    """Map each word for a value of a field, normalized by `letters`, to our word: the words of other tools, and our own."""
    foreign = table()["words"].get(path, {})
    if isinstance(foreign, str):
        return words_of(foreign)
    own = next((field.values for field in all_fields() if field.path == f"spec.{path}"), ())
    return {letters(word): ours for ours, text in [*zip(own, own, strict=True), *foreign.items()] for word in text.split()}


def answer_to(path: str, word: str) -> Mapping[str, str] | None:
    """Return what to answer to a word for something that we do not offer: `write`, `why` and sometimes `reason`."""
    rows_of_field = (row for row in table()["word"] if row["field"] == path)
    return next((row for row in rows_of_field if letters(word) in map(letters, row["words"].split())), None)


def answer(name: str, value: Any, spec: Spec) -> Proposal | None:
    """Translate a setting; None if no other tool is known to have it. spec: the whole spec as written.

    The edits do not include the removal of the setting itself.
    """
    row = rows().get(letters(name))
    if row is None:
        return None
    match row["kind"]:
        case "removed":
            return Proposal(f"remove it: {row['why']}")
        case "switches":
            return _switch(row, value)
        case "worded":
            word = words_of(row["path"]).get(letters(str(value)))
            ours = word or row["usual"]
            return _set(
                {row["path"]: ours}, f"write spec.{row['path']}: {ours}{row.get('note', '')}", is_certain=word is not None
            )
        case "converted":
            return _CONVERSIONS[row["convert"]](row, value, spec)
        case _:
            return _same(row, value)


def answer_without_value(name: str) -> str:
    """Explain what to write here for a setting, whatever its value; empty if no other tool is known to have it."""
    row = rows().get(letters(name))
    if row is None or "explain" in row:
        return "" if row is None else str(row["explain"])
    values = row.get("example") or ((True, False) if row["kind"] == "switches" else (None,))
    texts = []
    for value in values:
        equivalent = answer(name, value, {})
        fix = "" if equivalent is None else equivalent.fix
        texts.append(fix if value is None else f"for {name}: {yaml_text(value)}, {fix}")
    return " ".join(f"{text[:1].upper()}{text[1:]}." for text in texts)


def _set(changes: Mapping[str, Any], fix: str, *, is_certain: bool = True) -> Proposal:
    """Propose new values by path under `spec`."""
    return Proposal(fix, tuple((("spec", *path.split(".")), value) for path, value in changes.items()), is_certain)


def _same(row: Row, value: Any) -> Proposal:
    return _set({row["path"]: value}, f"write spec.{row['path']}")


def _switch(row: Row, value: Any) -> Proposal:
    path = row["path"]
    if is_off(value) and "off" not in row:
        return Proposal(f"remove it: {row.get('unset', 'that is the default')}", is_certain=True)
    if is_off(value):
        fix = f"write spec.{path}: {yaml_text(row['off'])}"
        return _set({path: row["off"]}, fix, is_certain=row.get("off_is_certain", True))
    shown = f"[{', '.join(row['on'])}]" if isinstance(row["on"], list) else yaml_text(row["on"])
    is_on = value is True or str(value).lower() == "true"
    fix = row.get("fix") or f"write spec.{path}: {shown}{row.get('note', '')}"
    return _set({path: row["on"], **row.get("also", {})}, fix, is_certain=is_on and row.get("certain", True))


def _accumulation(_row: Row, value: Any, spec: Spec) -> Proposal:
    paths = ("training.microBatchSize", "parallelism.nodes", "parallelism.processesPerNode")
    micros, nodes, processes = ([count(each) for each in values_of(spec, names_of(path))] for path in paths)
    micro, steps = next(filter(None, micros), None), count(value)
    ranks = math.prod(next(filter(None, counts), 1) for counts in (nodes, processes))
    total = (micro or 1) * ranks * (steps or 1)
    is_clear = all(len({*counts}) < 2 and None not in counts for counts in (micros, nodes, processes, [steps]))
    has_total = any(True for _ in values_of(spec, _TOTALS))
    # Other trainers fill a batch with single records unless packing is enabled, which leaves far fewer steps.
    packs = any(True for _ in values_of(spec, names_of("data.packing")))
    return _set(
        {"training.globalBatchSize": min(total, _MOST_COUNTED)},
        f"write spec.training.globalBatchSize: {total} (microBatchSize {micro or 'unset, taken as 1'} x {ranks} "
        f"rank{'s' if ranks > 1 else ''} x {steps or 1} accumulated): accumulation follows from it"
        + ("" if packs else "; spec.data.packing: false keeps the number of steps, as sequences then hold one record each"),
        is_certain=micro is not None and is_clear and not has_total and total <= _MOST_COUNTED,
    )


def _trackers(_row: Row, value: Any, _spec: Spec) -> Proposal:
    names = [str(each) for each in value] if isinstance(value, list) else [] if is_off(value) else [str(value)]
    names = [name for name in names if name.lower() not in ("none", "all")]
    if not names:
        return Proposal("remove it: nothing is reported to a tracker unless spec.training.trackers names one", is_certain=True)
    return _set({"training.trackers": names}, f"write spec.training.trackers: [{', '.join(names)}]")


def _tokens(row: Row, value: Any, _spec: Spec) -> Proposal:
    """Translate a list of tokens, or a string that separates them with commas."""
    is_special = row["convert"] == "special_tokens"
    given = value if isinstance(value, list) else [] if is_off(value) else str(value).split(",")
    names = [str(each).strip() for each in given if str(each).strip()]
    tokens = [{"content": name, **({"special": True} if is_special else {})} for name in names]
    more = ", each with special: true" if is_special else ""
    fix = f"name them as content in spec.model.addedTokens{more}: their rows are trained"
    return _set({"model.addedTokens": tokens} if tokens else {}, fix)


def _warmup(_row: Row, value: Any, spec: Spec) -> Proposal:
    total, steps, share = _total_steps(spec), count(value), _share(value)
    path = "training.warmupRatio"
    if share is not None or is_off(value):
        written = f"{share or 0:g}"
        return _set({path: written}, f'write spec.{path}: "{written}"')
    written = f"{min(steps / total, 0.99):.3g}" if total and steps else "0.03"
    return _set({path: written}, f'write spec.{path}: "{written}", a share of all steps', is_certain=False)


def _every(row: Row, value: Any, spec: Spec) -> Proposal:
    """Translate a number of steps; transformers also accepts a share of all steps."""
    share, total = _share(value), _total_steps(spec)
    if share is None:
        return _same(row, value)
    steps = max(round(share * total), 1) if total else _USUAL_STEPS
    fix = f"write spec.{row['path']}: {steps}, a number of steps, not a share of them"
    return _set({row["path"]: steps}, fix, is_certain=False)


def _targets(row: Row, value: Any, _spec: Spec) -> Proposal:
    if str(value).strip().lower() in ("all", "all-linear"):
        return _set({row["path"]: ["all-linear"]}, f"write spec.{row['path']}: [all-linear]")
    return _same(row, value)


_CONVERSIONS: Mapping[str, Callable[[Row, Any, Spec], Proposal]] = {
    "accumulation": _accumulation,
    "batch": lambda row, value, _: _set({row["path"]: value}, row["fix"], is_certain=False),
    "bits": lambda _, value, __: _switch(rows()[f"loadin{8 if value == 8 else 4}bit"], value if is_off(value) else True),
    "every": _every,
    "special_tokens": _tokens,
    "targets": _targets,
    "tokens": _tokens,
    "trackers": _trackers,
    "wandb": lambda row, value, spec: _trackers(row, [] if is_off(value) else "wandb", spec),
    "warmup": _warmup,
}


def is_off(value: Any) -> bool:
    """Whether a switch is off, in any spelling."""
    return value is False or str(value).strip().lower() in ("false", "no", "none", "null", "off", "0", "")


def values_of(written: Any, names: Container[str]) -> Iterator[Any]:
    """Yield the values under these names in any part of a spec, because people paste settings anywhere."""
    for name, value in written.items() if isinstance(written, Mapping) else ():
        if isinstance(value, Mapping):
            yield from values_of(value, names)
        elif value is not None and letters(str(name)) in names:
            yield value


def number(value: Any) -> float | None:
    """Return a finite number, written with or without quotes; None for anything else."""
    try:
        parsed = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        return None
    return parsed if math.isfinite(parsed) else None


def count(value: Any) -> int | None:
    """Return a whole number above 0, written with or without quotes; None for anything else."""
    parsed = number(value)
    return int(parsed) if parsed is not None and 0 < parsed <= _MOST_COUNTED and parsed == int(parsed) else None


def _share(value: Any) -> float | None:
    """Return a number between 0 and 1, which transformers reads as a share of all steps; None for anything else."""
    parsed = number(value)
    return parsed if parsed is not None and 0 < parsed < 1 else None


def _total_steps(spec: Spec) -> int | None:
    training = spec.get("training")
    return count(training.get("maxSteps")) if isinstance(training, Mapping) else None

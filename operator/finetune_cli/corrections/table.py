"""The table of foreign names and values, foreign_settings.toml, as Python reads it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from finetune_cli.corrections.wrong_field import letters
from finetune_job.fields import all_fields


@dataclass(frozen=True)
class Row:
    """A setting of other tools."""

    names: tuple[str, ...]
    """Names of the setting, the commonest first."""
    kind: str
    """The section of the table: same, removed, switches, worded or converted."""
    path: str = ""
    """Our field below `spec`."""
    on: Any = None
    off: Any = None
    unset: str = "that is so if nothing is set"
    """Why nothing is set if a switch without `off` is off."""
    certain: bool = True
    off_is_certain: bool = True
    also: tuple[tuple[str, Any], ...] = ()
    """Further fields that are set, with their values."""
    note: str = ""
    fix: str = ""
    why: str = ""
    """Why a setting is removed."""
    usual: str = ""
    convert: str = ""
    example: tuple[Any, ...] = ()
    explain: str = ""


@cache
def table() -> dict[str, Any]:
    """Read the file."""
    return tomllib.loads(files("finetune_cli.corrections").joinpath("foreign_settings.toml").read_text())


@cache
def rows() -> Mapping[str, Row]:
    """Map each name, without its spelling, to its row."""
    by_name: dict[str, Row] = {}
    for kind in ("same", "removed", "switches", "worded", "converted"):
        for key, entry in table()[kind].items():
            names = tuple(key.split())
            row = {"same": {"path": entry}, "removed": {"why": entry}}.get(kind, entry)
            row = row | {"also": tuple(row.get("also", {}).items()), "example": tuple(row.get("example", ()))}
            by_name |= dict.fromkeys(map(letters, names), Row(names, kind, **row))
    return by_name


def names_of(path: str) -> frozenset[str]:
    """The names, without their spelling, that our field has elsewhere, and its own."""
    others = {letters(name) for row in rows().values() if row.kind == "same" and row.path == path for name in row.names}
    return frozenset({letters(path.rpartition(".")[2]), *others})


@cache
def words_of(path: str) -> Mapping[str, str]:
    """Map each word, without its spelling, that other tools have for a value of our field, and its own words."""
    foreign = table()["words"].get(path, {})
    if isinstance(foreign, str):
        return words_of(foreign)
    own = next((field.values for field in all_fields() if field.path == f"spec.{path}"), ())
    return {letters(word): ours for ours, text in [*zip(own, own, strict=True), *foreign.items()] for word in text.split()}


def answer_to(path: str, word: str) -> Mapping[str, str] | None:
    """The answer to a word for something that we do not have: `write`, `why` and maybe `reason`."""
    rows_of_field = (row for row in table()["word"] if row["field"] == path)
    return next((row for row in rows_of_field if letters(word) in map(letters, row["words"].split())), None)

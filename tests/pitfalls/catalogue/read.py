"""The entries of the decision table, read from data/*.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from tests.pitfalls.catalogue.entry import Avoided, Changed, Entry, NotApplicable, NotReproduced, Refused, Reproduced, Severity

FOLDER = Path(__file__).parent / "data"
COUNT = 173
_EVIDENCE = {"reproduced": Reproduced, "changed": Changed, "not-run": NotReproduced}
_DECISIONS = {"refused": Refused, "avoided": Avoided, "not-applicable": NotApplicable}


def entries(folder: Path = FOLDER) -> tuple[Entry, ...]:
    """All entries by number. Raises TypeError for a key that an entry does not have, KeyError for an unknown kind."""
    found = [
        _entry(written)
        for path in sorted(folder.glob("*.toml"))
        for written in tomllib.loads(path.read_text(encoding="utf-8"))["pitfall"]
    ]
    return tuple(sorted(found, key=lambda entry: entry.number))


def _entry(written: dict[str, Any]) -> Entry:
    given = _frozen(written)
    given["severity"] = Severity(given["severity"])
    for part, kinds in (("evidence", _EVIDENCE), ("decision", _DECISIONS)):
        table = _frozen(given[part])
        given[part] = kinds[table.pop("kind")](**table)
    return Entry(**given)


def _frozen(table: dict[str, Any]) -> dict[str, Any]:
    """The same with tuples for lists."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}

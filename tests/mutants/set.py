"""The sets of mutants: one line of the product each, changed so that a property breaks.

`operator` has mutants of what the operator does, for which the tests to run follow from the file's name. `decisions` has those of
what the other packages decide without effects: the rules, the plan, the memory planner, and the parts of the trainer that are
functions of their input alone. There each file of mutants names the tests that are run for its mutants.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "operator/finetune_operator"
FOLDER = Path(__file__).parent / "data"
FOLDERS = {"operator": FOLDER, "decisions": FOLDER / "decisions"}


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    id: str
    file: str
    """Under `package`."""
    old: str
    """Occurs once in the file."""
    new: str
    breaks: str
    """The property that does not hold any more."""
    package: str = PACKAGE
    """A directory under the root."""
    tests: tuple[str, ...] = ()
    """Files of tests that are run, in this order; empty: those that belong to the file."""

    @property
    def path(self) -> str:
        """Of the file, under the root."""
        return f"{self.package}/{self.file}"

    def applied(self, source: str) -> str:
        """The file with the change. Raises ValueError where it does not fit any more."""
        found = source.count(self.old)
        if found != 1:
            raise ValueError(f"{self.id}: the old text occurs {found} times in {self.file}: {self.old!r}")
        return source.replace(self.old, self.new)


def read_set(folder: Path = FOLDERS["operator"]) -> list[Mutant]:
    """All mutants, file by file. Raises ValueError where an id occurs twice.

    `package` and `tests` at the head of a file are those of all its mutants that have none of their own.
    """
    mutants = [mutant for path in sorted(folder.glob("*.toml")) for mutant in _read(path)]
    ids = [mutant.id for mutant in mutants]
    twice = sorted({one for one in ids if ids.count(one) > 1})
    if twice:
        raise ValueError(f"ids that occur twice: {', '.join(twice)}")
    return mutants


def _read(path: Path) -> list[Mutant]:
    content: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    entries = content.pop("mutant")
    return [Mutant(**{**content, **entry, "tests": tuple(entry.get("tests", content.get("tests", ())))}) for entry in entries]


def outdated(mutants: list[Mutant], root: Path = ROOT) -> list[str]:
    """What is wrong with mutants that do not fit the sources any more: the set has to follow the code."""
    problems = []
    for mutant in mutants:
        path = root / mutant.path
        if not path.is_file():
            problems.append(f"{mutant.id}: there is no {mutant.file}")
            continue
        try:
            mutant.applied(path.read_text(encoding="utf-8"))
        except ValueError as problem:
            problems.append(str(problem))
        problems += [f"{mutant.id}: there is no {test}" for test in mutant.tests if not (ROOT / test).is_file()]
    return problems

"""The set of mutants: one line of the operator each, changed so that a property breaks."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "operator" / "finetune_operator"
FOLDER = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    id: str
    file: str
    """Under `finetune_operator`."""
    old: str
    """Occurs once in the file."""
    new: str
    breaks: str
    """The property that does not hold any more."""

    def applied(self, source: str) -> str:
        """The file with the change. Raises ValueError where it does not fit any more."""
        found = source.count(self.old)
        if found != 1:
            raise ValueError(f"{self.id}: the old text occurs {found} times in {self.file}: {self.old!r}")
        return source.replace(self.old, self.new)


def read_set(folder: Path = FOLDER) -> list[Mutant]:
    """All mutants, file by file. Raises ValueError where an id occurs twice."""
    mutants = [
        Mutant(**entry)
        for path in sorted(folder.glob("*.toml"))
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    ]
    ids = [mutant.id for mutant in mutants]
    twice = sorted({one for one in ids if ids.count(one) > 1})
    if twice:
        raise ValueError(f"ids that occur twice: {', '.join(twice)}")
    return mutants


def outdated(mutants: list[Mutant], package: Path = PACKAGE) -> list[str]:
    """What is wrong with mutants that do not fit the sources any more: the set has to follow the code."""
    problems = []
    for mutant in mutants:
        path = package / mutant.file
        if not path.is_file():
            problems.append(f"{mutant.id}: there is no {mutant.file}")
            continue
        try:
            mutant.applied(path.read_text(encoding="utf-8"))
        except ValueError as problem:
            problems.append(str(problem))
    return problems

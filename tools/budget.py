"""`python -m tools.budget`: check that no package has more lines of Python, or more faulty docstrings, than budget.toml allows.

`--lower` writes the current numbers into budget.toml where they are lower. A number is raised by hand, with the reason next to
it.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence

from tools import prose

FILE = prose.ROOT / "budget.toml"
PACKAGES = {**prose.PRODUCT, "tests": "tests", "tools": "tools"}
"""The directory of each package."""


def lines(package: str) -> int:
    """Count the lines of Python of a package."""
    paths = (prose.ROOT / PACKAGES[package]).rglob("*.py")
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def counted() -> dict[str, dict[str, int]]:
    """Count what the tables of budget.toml limit."""
    return {"lines": {package: lines(package) for package in PACKAGES}, "prose": prose.counted()}


def exceeded(numbers: Mapping[str, Mapping[str, int]], budget: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Describe each number that is above its budget. The budget of a package that budget.toml does not list is zero."""
    return [
        f"[{table}] {package}: {number:,}, and budget.toml allows {budget[table].get(package, 0):,}"
        for table, row in numbers.items()
        for package, number in row.items()
        if number > budget[table].get(package, 0)
    ]


def lowered(text: str, table: str, numbers: Mapping[str, int]) -> str:
    """Return budget.toml's text with the budgets of a table lowered to the counted numbers."""
    head, title, rest = text.partition(f"[{table}]\n")
    body, separator, tail = rest.partition("\n[")
    for package, number in numbers.items():
        row = re.search(rf"^{package} = ([\d_]+)", body, re.MULTILINE)
        if row is not None and int(row[1]) > number:
            body = f"{body[: row.start(1)]}{number:_}{body[row.end(1) :]}"
    return f"{head}{title}{body}{separator}{tail}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the tree with the budget. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.budget", description=__doc__)
    parser.add_argument("--lower", action="store_true", help="write the current numbers into budget.toml where they are lower")
    options = parser.parse_args(arguments)
    numbers, text = counted(), FILE.read_text(encoding="utf-8")
    if options.lower:
        for table, row in numbers.items():
            text = lowered(text, table, row)
        FILE.write_text(text, encoding="utf-8")
    problems = exceeded(numbers, tomllib.loads(text))
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        print("remove lines, or raise the number with the reason next to it; tools/prose.py lists docstrings", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""Which test executes which command of the pages, letter by letter; and which commands no test executes, and why.

documented_by.yaml has the table. README, docs and the other pages have blocks of code, whose lines are commands of their own or
are executed together (a script, a manifest), and commands within sentences. The table has each of them once, by its whole text.
tests/conftest.py checks after a test that the test has done what the table says of it; tests/unit/test_documentation_blocks.py
checks that no command is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.support.cases import table
from tests.support.documented import executed_by


@dataclass(frozen=True)
class Entry:
    """How a command is tested: exactly one of `test`, `make` and `untested` is set."""

    test: str = ""
    words: frozenset[str] = frozenset()
    """Words of the page that the test replaces."""
    played: frozenset[str] = frozenset()
    """Programs that the test replaces."""
    make: str = ""
    """The target of make that runs it."""
    untested: str = ""
    """Why no test executes it."""


_TESTS = table(__file__, "tests")


def _entries(name: str) -> Mapping[str, Entry]:
    rows = table(__file__, name)
    return {
        key: Entry(
            test=_TESTS.get(row.get("by"), row.get("by", "")),
            words=frozenset(row.get("words", ())),
            played=frozenset(row.get("played", ())),
            make=row.get("make", ""),
            untested=row.get("untested", ""),
        )
        for key, row in rows.items()
    }


BLOCKS, LINES = _entries("blocks"), _entries("lines")
NAMES: frozenset[str] = frozenset(table(__file__, "names"))


def not_executed(test: str) -> list[str]:
    """Return the commands that this test should have executed, and has not or with other words replaced."""
    name = test.partition("[")[0]
    executed = {(one.key, one.stand_ins, one.played) for one in executed_by(name.partition("::")[0])}
    return [
        key
        for key, entry in {**BLOCKS, **LINES}.items()
        if entry.test == name and (key, entry.words, entry.played) not in executed
    ]

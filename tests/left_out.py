"""What a suite leaves out, and why: noted by the processes that run its tests, and read by `tests.suites`."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

VARIABLE = "TESTS_LEFT_OUT"
"""Environment variable: the file to which processes add their notes."""
FOR_THE_NIGHT = "left for `make nightly`"
NIGHTLY = "nightly"
"""Marker of tests that `make test` leaves out: self-tests of the tests, and the exhaustive halves of others."""


def note(tests: Iterable[str], reason: str) -> None:
    """Add a line for each test, if anybody wants to know. Several processes may add the same ones."""
    path = os.environ.get(VARIABLE)
    if path:
        lines = "".join(json.dumps([reason, test]) + "\n" for test in tests)
        with Path(path).open("a") as file:
            file.write(lines)


def noted(path: Path) -> dict[str, list[str]]:
    """Tests by reason, each once."""
    found: dict[str, set[str]] = {}
    for line in path.read_text().splitlines():
        reason, test = json.loads(line)
        found.setdefault(reason, set()).add(test)
    return {reason: sorted(tests) for reason, tests in sorted(found.items())}

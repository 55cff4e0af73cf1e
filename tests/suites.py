"""Runs the test suites one after another and prints the minutes of each beside its budget.

`python -m tests.suites [NAME...]`. All suites run even when one fails; the exit code is 1 when any did. The budgets add up to the
45 minutes that a cold run may take on two cores; a suite above its budget is marked, and fails only when the sum is exceeded,
because machines are noisy.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
PYTEST = (str(BIN / "pytest"), "-q", "--durations=5")
ON_BOTH_CORES = (*PYTEST, "-n", "2", "--dist", "loadfile")
LIMIT_MINUTES = 45.0


@dataclass(frozen=True)
class Suite:
    """Commands that belong together, and the minutes that they may take together on a cold machine."""

    name: str
    budget_minutes: float
    commands: tuple[tuple[str, ...], ...]


SUITES = (
    Suite(
        "lint",
        0.5,
        ((str(BIN / "ruff"), "check", "."), (str(BIN / "ruff"), "format", "--check", "."), (str(BIN / "lint-imports"),)),
    ),
    Suite("types", 1.0, ((str(BIN / "mypy"),),)),
    Suite("unit", 8.5, ((*ON_BOTH_CORES, "tests/unit"),)),
    Suite("merge-matrix", 1.5, ((*ON_BOTH_CORES, "tests/merge_matrix"),)),
    Suite("pitfalls", 1.0, ((*ON_BOTH_CORES, "tests/pitfalls"),)),
    Suite("sweep", 4.0, ((sys.executable, "-m", "tests.sweep", "--count", "300"),)),
    Suite("hostile", 1.0, ((*ON_BOTH_CORES, "tests/hostile"),)),
    Suite("cluster-binaries", 6.0, ((sys.executable, "-m", "tests.support.cluster.binaries"),)),
    Suite(
        "kill",
        2.0,
        (
            (sys.executable, "-m", "tests.kill", "--runs", "5"),
            (sys.executable, "-m", "tests.kill.merge"),
            (sys.executable, "-m", "tests.kill.publish"),
            (sys.executable, "-m", "tests.kill.publish_hub", "--runs", "5"),
        ),
    ),
    Suite("integration", 4.0, ((*PYTEST, "tests/integration"),)),
    Suite("images", 5.0, ((sys.executable, "-m", "tests.support.images", "all"),)),
    Suite("e2e", 10.5, ((*PYTEST, "tests/e2e"),)),
)


@dataclass(frozen=True)
class Result:
    """How a suite ended."""

    suite: Suite
    minutes: float
    failed: tuple[str, ...]


def run(suite: Suite) -> Result:
    """Run every command of a suite, also after one has failed."""
    print(f"\n=== {suite.name} (budget {suite.budget_minutes:g} min)", flush=True)
    start = time.monotonic()
    # Tests fork processes that have computed with torch: a child waits for ever for threads that it does not have.
    environment = {"OMP_NUM_THREADS": "1"} | {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    failed = tuple(
        " ".join(command)
        for command in suite.commands
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode != 0
    )
    return Result(suite, (time.monotonic() - start) / 60, failed)


def summary(results: list[Result]) -> tuple[str, bool]:
    """The table, and whether everything held."""
    lines = ["", f"{'suite':<18}{'minutes':>8}{'budget':>8}  result"]
    for result in results:
        verdict = "FAILED: " + "; ".join(result.failed) if result.failed else "passed"
        over = "  over budget" if result.minutes > result.suite.budget_minutes else ""
        lines.append(f"{result.suite.name:<18}{result.minutes:>8.1f}{result.suite.budget_minutes:>8.1f}  {verdict}{over}")
    total = sum(result.minutes for result in results)
    lines.append(f"{'all':<18}{total:>8.1f}{LIMIT_MINUTES:>8.1f}")
    held = not any(result.failed for result in results)
    if total > LIMIT_MINUTES:
        lines.append(f"over the limit of {LIMIT_MINUTES:g} minutes")
        held = False
    return "\n".join(lines), held


def main(names: list[str]) -> int:
    """Run the named suites, or all of them. Returns the exit code."""
    known = {suite.name: suite for suite in SUITES}
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"unknown suite {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    text, held = summary([run(suite) for suite in SUITES if not names or suite.name in names])
    print(text, flush=True)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

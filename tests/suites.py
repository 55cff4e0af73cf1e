"""Runs the test suites one after another and prints the processor minutes of each beside its budget.

`python -m tests.suites [NAME...]`. All suites run even when one fails; the exit code is 1 when any did. The budgets add up to the
processor minutes of 45 minutes on two cores, cold. A suite above its budget is marked and fails nothing: machines are noisy.
Processes that do not end with their suite's commands, such as those of a container runtime, are not in its processor minutes.
"""

from __future__ import annotations

import os
import resource
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
"""Of a whole run on two cores, cold."""
LIMIT_PROCESSOR_MINUTES = 2 * LIMIT_MINUTES


@dataclass(frozen=True)
class Suite:
    """Commands that belong together, and the processor minutes that they may take together on a cold machine."""

    name: str
    budget_minutes: float
    commands: tuple[tuple[str, ...], ...]


SUITES = (
    Suite(
        "lint",
        0.5,
        ((str(BIN / "ruff"), "check", "."), (str(BIN / "ruff"), "format", "--check", "."), (str(BIN / "lint-imports"),)),
    ),
    Suite("types", 1.5, ((str(BIN / "mypy"),),)),
    # Half of the time its tests wait for processes that they have started.
    Suite("unit", 16.0, ((*PYTEST, "-n", "3", "--dist", "loadfile", "tests/unit"),)),
    Suite("merge-matrix", 3.0, ((*ON_BOTH_CORES, "tests/merge_matrix"),)),
    Suite("pitfalls", 2.0, ((*ON_BOTH_CORES, "tests/pitfalls"),)),
    Suite("sweep", 8.0, ((sys.executable, "-m", "tests.sweep", "--count", "300"),)),
    Suite("hostile", 2.0, ((*ON_BOTH_CORES, "tests/hostile"),)),
    Suite("simulation", 2.5, ((*PYTEST, "-n", "2", "tests/simulation"),)),
    Suite("cluster-binaries", 11.0, ((sys.executable, "-m", "tests.support.cluster.binaries"),)),
    Suite(
        "kill",
        3.0,
        (
            (sys.executable, "-m", "tests.kill", "--runs", "5"),
            (sys.executable, "-m", "tests.kill.merge"),
            (sys.executable, "-m", "tests.kill.publish"),
            (sys.executable, "-m", "tests.kill.publish_hub", "--runs", "5"),
        ),
    ),
    Suite("integration", 14.0, ((*PYTEST, "tests/integration"),)),
    Suite("images", 9.0, ((sys.executable, "-m", "tests.support.images", "all"),)),
    Suite("e2e", 15.0, ((*PYTEST, "tests/e2e"),)),
)


@dataclass(frozen=True)
class Result:
    """How a suite ended."""

    suite: Suite
    minutes: float
    processor_minutes: float
    failed: tuple[str, ...]


def run(suite: Suite) -> Result:
    """Run every command of a suite, also after one has failed."""
    print(f"\n=== {suite.name} (budget {suite.budget_minutes:g} processor minutes)", flush=True)
    start, processor_start = time.monotonic(), _processor_seconds()
    # Tests fork processes that have computed with torch: a child waits for ever for threads that it does not have.
    environment = {"OMP_NUM_THREADS": "1"} | {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    failed = tuple(
        " ".join(command)
        for command in suite.commands
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode != 0
    )
    return Result(suite, (time.monotonic() - start) / 60, (_processor_seconds() - processor_start) / 60, failed)


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def summary(results: list[Result]) -> tuple[str, bool]:
    """The table, and whether everything held."""
    lines = ["", f"{'suite':<18}{'minutes':>8}{'processor':>11}{'budget':>8}  result"]
    for result in results:
        verdict = "FAILED: " + "; ".join(result.failed) if result.failed else "passed"
        over = "  over budget" if result.processor_minutes > result.suite.budget_minutes else ""
        lines.append(
            _row(result.suite.name, result.minutes, result.processor_minutes, result.suite.budget_minutes) + f"  {verdict}{over}"
        )
    minutes, processor_minutes = (sum(getattr(one, name) for one in results) for name in ("minutes", "processor_minutes"))
    lines.append(_row("all", minutes, processor_minutes, LIMIT_PROCESSOR_MINUTES))
    return "\n".join(lines), not any(result.failed for result in results)


def _row(name: str, minutes: float, processor_minutes: float, budget: float) -> str:
    return f"{name:<18}{minutes:>8.1f}{processor_minutes:>11.1f}{budget:>8.1f}"


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

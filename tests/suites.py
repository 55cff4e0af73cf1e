"""Runs the test suites two at a time and prints the processor minutes of each next to its budget.

`python -m tests.suites [NAME...]`. Suites with a cluster wait for most of their time: they run one after another while those that
compute run as well, which give way. A suite's output is printed when the suite has ended, unless it is the only one. All suites
run even when one fails; the exit code is 1 when any did. The budgets add up to the processor minutes of 30 minutes on two cores,
cold. A suite above its budget is marked and fails nothing: machines are noisy. Below a suite stands what it did not run, and why.
"""

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests import left_out

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
PYTEST = (str(BIN / "pytest"), "-q", "--durations=5", "-m", f"not {left_out.NIGHTLY}")
REAPED = (sys.executable, "-m", "tests.reaped")
ON_BOTH_CORES = (*PYTEST, "-n", "2", "--dist", "loadfile")
LIMIT_MINUTES = 30.0
"""Of a whole run on two cores, cold."""
LIMIT_PROCESSOR_MINUTES = 2 * LIMIT_MINUTES


@dataclass(frozen=True)
class Suite:
    """Commands that belong together, and the processor minutes that they may take together on a cold machine."""

    name: str
    budget_minutes: float
    commands: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Group:
    """Suites that run one after another."""

    suites: tuple[Suite, ...]
    prefix: tuple[str, ...] = ()
    """What each command is started with."""


AT_A_TIME = 2
"""Groups. Each of these slots takes the next group when it is free."""
COMPUTING = (
    Suite(
        "lint",
        0.5,
        (
            (str(BIN / "ruff"), "check", "."),
            (str(BIN / "ruff"), "format", "--check", "."),
            (str(BIN / "lint-imports"),),
            (sys.executable, "-m", "tools.budget"),
        ),
    ),
    Suite("types", 1.5, ((str(BIN / "mypy"),),)),
    Suite("unit", 16.0, ((*ON_BOTH_CORES, "tests/unit"),)),
    Suite("merge-matrix", 3.0, ((*ON_BOTH_CORES, "tests/merge_matrix"),)),
    Suite("pitfalls", 2.0, ((*ON_BOTH_CORES, "tests/pitfalls"),)),
    Suite("sweep", 3.0, ((sys.executable, "-m", "tests.sweep", "--count", "100"),)),
    Suite("hostile", 3.0, ((*ON_BOTH_CORES, "tests/hostile"),)),
    Suite("simulation", 1.5, ((*PYTEST, "-n", "2", "tests/simulation"),)),
    Suite(
        "kill",
        2.5,
        (
            (sys.executable, "-m", "tests.kill", "--runs", "3"),
            (sys.executable, "-m", "tests.kill.merge"),
            (sys.executable, "-m", "tests.kill.publish"),
            (sys.executable, "-m", "tests.kill.publish_hub", "--runs", "3"),
        ),
    ),
)
WITH_A_CLUSTER = (
    Suite("cluster-binaries", 10.0, ((sys.executable, "-m", "tools.cluster.binaries"),)),
    Suite("integration", 4.0, ((*ON_BOTH_CORES, "tests/integration"),)),
    Suite("images", 5.0, ((sys.executable, "-m", "tools.images", "all"),)),
    Suite("e2e", 8.0, ((*PYTEST, "tests/e2e"),)),
)
GROUPS = (Group(WITH_A_CLUSTER), *(Group((suite,), ("nice", "-n", "10")) for suite in COMPUTING))
SUITES = tuple(suite for group in GROUPS for suite in group.suites)


@dataclass(frozen=True)
class Result:
    """How a suite ended."""

    suite: Suite
    minutes: float
    processor_minutes: float
    failed: tuple[str, ...]
    left_out: Mapping[str, list[str]] = field(default_factory=dict)
    """Tests by the reason why they did not run."""


def run(suite: Suite, prefix: tuple[str, ...] = (), *, at_once: bool = True) -> Result:
    """Run every command of a suite, each after `prefix`, also after one has failed.

    What they print is shown as it comes, or not `at_once`: when the last one has ended, so that suites do not mix their lines.
    """
    # Tests fork processes that have computed with torch: a child waits for ever for threads that it does not have.
    environment = {"OMP_NUM_THREADS": "1"} | {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    title = f"\n=== {suite.name} (budget {suite.budget_minutes:g} processor minutes)"
    _say(title if at_once else f"=== {suite.name} begins")
    start, processor_seconds, failed = time.monotonic(), 0.0, []
    with tempfile.TemporaryFile() as kept, tempfile.NamedTemporaryFile() as notes:
        environment[left_out.VARIABLE] = notes.name
        output = None if at_once else kept
        for command in suite.commands:
            process = subprocess.Popen((*REAPED, *prefix, *command), cwd=ROOT, env=environment, stdout=output, stderr=output)
            # The times of this process and of those that it has waited for; those of the other suite are not in them.
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            processor_seconds += used.ru_utime + used.ru_stime
            if process.returncode != 0:
                failed.append(" ".join(command))
        if not at_once:
            with _printing:
                _say(title)
                kept.seek(0)
                shutil.copyfileobj(kept, sys.stdout.buffer)
                sys.stdout.flush()
        not_run = left_out.noted(Path(notes.name))
    return Result(suite, (time.monotonic() - start) / 60, processor_seconds / 60, tuple(failed), not_run)


_printing = threading.Lock()


def _say(line: str) -> None:
    print(line, flush=True)


def run_all(groups: list[Group]) -> list[Result]:
    """Run the groups in their order, some at the same time."""

    def run_group(group: Group) -> list[Result]:
        return [run(suite, group.prefix, at_once=len(groups) == 1) for suite in group.suites]

    with ThreadPoolExecutor(AT_A_TIME) as threads:
        return list(itertools.chain.from_iterable(threads.map(run_group, groups)))


def summary(results: list[Result], minutes: float) -> tuple[str, bool]:
    """The table, whose last row has the minutes of the whole run, and whether everything held."""
    lines = ["", f"{'suite':<18}{'minutes':>8}{'processor':>11}{'budget':>8}  result"]
    for result in results:
        verdict = "FAILED: " + "; ".join(result.failed) if result.failed else "passed"
        over = "  over budget" if result.processor_minutes > result.suite.budget_minutes else ""
        lines.append(
            _row(result.suite.name, result.minutes, result.processor_minutes, result.suite.budget_minutes) + f"  {verdict}{over}"
        )
        lines += [f"    {len(tests)} not run: {reason}, {_named(tests)}" for reason, tests in result.left_out.items()]
    lines.append(_row("all", minutes, sum(result.processor_minutes for result in results), LIMIT_PROCESSOR_MINUTES))
    return "\n".join(lines), not any(result.failed for result in results)


def _named(tests: list[str]) -> str:
    files = {test.partition("::")[0] for test in tests}
    return tests[0] if len(tests) == 1 else ", ".join(sorted(files))


def _row(name: str, minutes: float, processor_minutes: float, budget: float) -> str:
    return f"{name:<18}{minutes:>8.1f}{processor_minutes:>11.1f}{budget:>8.1f}"


def main(names: list[str]) -> int:
    """Run the named suites, or all of them. Returns the exit code."""
    known = {suite.name: suite for suite in SUITES}
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"unknown suite {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    chosen = [replace(group, suites=tuple(one for one in group.suites if not names or one.name in names)) for group in GROUPS]
    start = time.monotonic()
    results = run_all([group for group in chosen if group.suites])
    text, held = summary(results, (time.monotonic() - start) / 60)
    print(text, flush=True)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

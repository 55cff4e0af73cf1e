"""`python -m tests.kill`: runs that are killed at random moments until they are done end with the bytes of undisturbed ones.

Every run gets SIGKILL, and another one like it SIGTERM. The sources draw the seed, so that each change of them kills other runs
at other moments; the seed also decides which case a run is of. Run N of a seed is always killed in the same way, but what it hits
at a given second depends on the machine.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from tests.kill.cases import CASES, ELASTIC_CASES, drawn_order, elastic_order
from tests.kill.moments import ALL_STAGES
from tests.kill.run import Outcome, Undisturbed, disturbed, undisturbed
from tests.support.source_seed import add_seed

REAL_EVERY = 20
"""One run in so many is started by the real torchrun, which takes ten seconds an attempt."""
SIGNALS = ("SIGKILL", "SIGTERM")


def main(argv: Sequence[str] | None = None) -> int:
    """Run all, print the table; 1 where any run differed."""
    parser = argparse.ArgumentParser(prog="python -m tests.kill", description=__doc__)
    parser.add_argument("--runs", type=int, default=10, help="runs for each signal")
    parser.add_argument("--first", type=int, default=0, help="number of the first run, to repeat one")
    add_seed(parser)
    parser.add_argument("--elastic", action="store_true", help="each attempt on another number of ranks, added up in order")
    parser.add_argument("--signal", choices=SIGNALS, help="only this one")
    parser.add_argument("--where", default="", metavar="TEXT", help="only cases with this in their names")
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time")
    arguments = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    numbers = range(arguments.first, arguments.first + arguments.runs)
    signals = (arguments.signal,) if arguments.signal else SIGNALS
    start = time.monotonic()
    directory = Path(tempfile.mkdtemp(prefix="kill-"))
    order = elastic_order(arguments.seed) if arguments.elastic else drawn_order(arguments.seed)
    order = tuple(case for case in order if arguments.where in case.name)
    used = {number % len(order) for number in numbers}
    print(f"seed {arguments.seed}: {', '.join(order[index].name for index in sorted(used))}", flush=True)
    bases = {index: undisturbed(order[index], directory / f"case-{index}") for index in sorted(used)}
    print(f"{len(bases)} undisturbed runs: {time.monotonic() - start:.0f} s", flush=True)
    with ThreadPoolExecutor(arguments.parallel) as pool:
        jobs = [(number, signal) for number in numbers for signal in signals]
        outcomes = list(pool.map(lambda job: _run(arguments, *job, bases, directory, len(order)), jobs))
    print(table(outcomes))
    print(f"{len(outcomes)} runs, {sum(not outcome.problem for outcome in outcomes)} identical, ", end="")
    print(f"{sum(outcome.is_real for outcome in outcomes)} of them by torchrun; {(time.monotonic() - start) / 60:.1f} minutes")
    if any(outcome.problem for outcome in outcomes):
        print(f"what the failed runs left: {directory}")
        return 1
    shutil.rmtree(directory)
    return 0


def _run(
    arguments: argparse.Namespace, number: int, signal: str, bases: dict[int, Undisturbed], directory: Path, num_cases: int
) -> Outcome:
    base = bases[number % num_cases]
    random = Random(f"{arguments.seed}/{number}/{signal}")
    start = time.monotonic()
    outcome = disturbed(
        base, directory / f"run-{number}-{signal}", random, deadly=signal == "SIGKILL", is_real=number % REAL_EVERY == 0
    )
    verdict = f"{outcome.problem or 'identical'}, {time.monotonic() - start:.0f} s"
    print(f"run {number:>3} {signal} {outcome.case}{' by torchrun' if outcome.is_real else ''}: {verdict}", flush=True)
    if outcome.problem:
        print("  " + "\n  ".join(outcome.story))
        drawn = f"{' --elastic' if base.case.sizes else ''} --seed {arguments.seed} --where {arguments.where!r}"
        print(f"  repeat: python -m tests.kill{drawn} --first {number} --runs 1 --signal {signal}", flush=True)
    return outcome


def table(outcomes: Sequence[Outcome]) -> str:
    """Runs, identical ones and signals by the stage that they hit, by case and signal."""
    columns = (*ALL_STAGES, "torchrun")
    lines = [f"{'case':<26}{'signal':<9}{'runs':>5}{'identical':>10}" + "".join(f"{column:>11}" for column in columns)]
    totals: Counter[str] = Counter()
    for case in (*CASES, *ELASTIC_CASES):
        for signal in SIGNALS:
            of_case = [outcome for outcome in outcomes if (outcome.case, outcome.signal) == (case.name, signal)]
            landed = sum((outcome.landed for outcome in of_case), Counter())
            totals += landed
            if of_case:
                identical = sum(not outcome.problem for outcome in of_case)
                counts = "".join(f"{landed[column]:>11}" for column in columns)
                lines.append(f"{case.name:<26}{signal:<9}{len(of_case):>5}{identical:>10}{counts}")
    lines.append(f"{'signals that landed':<50}" + "".join(f"{totals[column]:>11}" for column in columns))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

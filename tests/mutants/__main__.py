"""Does a test fail for every broken property?

    python -m tests.mutants [--set NAME] [--list] [--only ID]... [--sample N --seed S] [--floor SHARE]

Each mutant is one changed line; the unit tests of its part run against a copy of the product with it. Prints a line for each and
the share that was killed; the exit code is 1 if that is below the floor, or if a mutant does not fit the sources any more.
"""

from __future__ import annotations

import argparse
import random
import sys

from tests.mutants.run import Verdict, chosen_tests, run, warm_up
from tests.mutants.set import FOLDERS, Mutant, outdated, read_set

FLOOR = 0.95


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="One-line mutants of the product.")
    parser.add_argument("--set", choices=FOLDERS, default="operator", help="what the operator does, or what all else decides")
    parser.add_argument("--list", action="store_true", help="print the set and run nothing")
    parser.add_argument(
        "--only", action="append", default=[], metavar="ID", help="run these alone; an id or the beginning of some"
    )
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="run N of them, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--floor", type=float, default=FLOOR, help="share that must be killed")
    given = parser.parse_args(arguments)
    mutants = read_set(FOLDERS[given.set])
    problems = outdated(mutants)
    if problems:
        print("\n".join(["The set does not fit the sources any more; correct these:", *problems]))
        return 1
    chosen = choose(mutants, given.only, given.sample, given.seed)
    if given.list:
        for mutant in chosen:
            print(f"{mutant.id:<48} {mutant.file:<30} {mutant.breaks}")
        print(f"{len(chosen)} mutants")
        return 0
    warm_up(chosen)
    suites = dict.fromkeys(tuple(sorted(chosen_tests(mutant))) for mutant in chosen)
    failing = [verdict.by for verdict in (run(None, list(suite)) for suite in suites) if verdict.killed]
    if failing:
        print(f"tests fail without any mutant: {', '.join(failing)}")
        return 1
    verdicts = []
    for mutant in chosen:
        verdicts.append(run(mutant, chosen_tests(mutant)))
        print(line(verdicts[-1]), flush=True)
    return report(verdicts, given.floor)


def choose(mutants: list[Mutant], only: list[str], sample: int, seed: int) -> list[Mutant]:
    """Those that were asked for."""
    chosen = [mutant for mutant in mutants if not only or mutant.id.startswith(tuple(only))]
    return random.Random(seed).sample(chosen, min(sample, len(chosen))) if sample else chosen


def line(verdict: Verdict) -> str:
    """One mutant and what became of it."""
    assert verdict.mutant is not None
    word = "killed  " if verdict.killed else "SURVIVED"
    return f"{word} {verdict.mutant.id:<48} {verdict.seconds:6.1f} s  {verdict.by or verdict.mutant.breaks}"


def report(verdicts: list[Verdict], floor: float) -> int:
    """Print the share, and say whether it is enough."""
    killed = sum(verdict.killed for verdict in verdicts)
    share = killed / len(verdicts) if verdicts else 1.0
    print(f"{killed} of {len(verdicts)} killed ({share:.1%}); {floor:.0%} are wanted")
    return 0 if share >= floor else 1


if __name__ == "__main__":
    sys.exit(main())

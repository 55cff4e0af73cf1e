"""Walks: `python -m tests.simulation [--first SEED] [--seeds N] [--steps N] [--only 3,17,29] [--shrink] [--trace]`.

Without --only the first N steps of each seed are taken. Prints one line per walk that fails; the exit code is 1 when any did.
"""

import argparse
import logging
import os
import sys
import time

import structlog

from tests.simulation.walk import Outcome, shrink, walk


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Walks of the simulated cluster.")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds")
    parser.add_argument("--steps", type=int, default=300, help="steps of each walk")
    parser.add_argument("--only", default="", help="numbers of the steps to take, with commas")
    parser.add_argument("--shrink", action="store_true", help="look for the fewest steps that fail in the same way")
    parser.add_argument("--trace", action="store_true", help="print what happened")
    parser.add_argument("--logs", action="store_true", help="show the operator's own log")
    given = parser.parse_args(arguments)
    if not given.logs:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    numbers = [int(one) for one in given.only.split(",")] if given.only else list(range(given.steps))
    started, failed = time.process_time(), 0
    for seed in range(given.first, given.first + given.seeds):
        outcome = walk(seed, numbers)
        if outcome.error:
            failed += 1
            if given.shrink:
                print(f"seed {seed}: {first_line(outcome)}: shrinking ...", flush=True)
                wanted = kind_of(outcome)
                fewest = shrink(seed, numbers, lambda other, wanted=wanted: kind_of(other) == wanted)
                outcome = walk(seed, fewest)
                print(f"  --first {seed} --only {','.join(map(str, fewest))} --trace")
            print(f"seed {seed}: FAILED: {outcome.error}", flush=True)
        if given.trace or (outcome.error and given.shrink):
            print("\n".join(outcome.trace.lines), flush=True)
        if given.trace:
            print(dict(outcome.phases), dict(outcome.trace.counts))
    seconds = time.process_time() - started
    print(f"{given.seeds} walks of {len(numbers)} steps, {failed} failed, {seconds:.1f} s of processor time")
    return 1 if failed else 0


def first_line(outcome: Outcome) -> str:
    return (outcome.error.splitlines() or [""])[0][:200]


def kind_of(outcome: Outcome) -> str:
    """What failures have in common that are the same to a reader: the words without names and numbers."""
    return "".join(letter for letter in first_line(outcome)[:80] if not letter.isdigit())


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Sets of texts have an order of their own in each process: a walk is the same each time only with this one.
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"}
        )
    sys.exit(main())

"""`python -m tests.sweep`: run combinations of settings end to end, and compare what happens with what the gates say.

Prints false accepts, false refusals and unexplained outcomes; the exit code is 1 unless all three are zero. What is judged so is
run a second time, alone, and the second judgement counts; the summary says of how many, and which of them came out otherwise.
"""

import argparse
import itertools
import json
import math
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from finetune_job.rules.book import RULES
from tests.support.source_seed import seed_of_the_sources, sources_digest
from tests.sweep.case import Case
from tests.sweep.judge import WRONG, is_never_false
from tests.sweep.material import make_material
from tests.sweep.methods import ATTEMPTS, table_cases
from tests.sweep.record import OUTCOMES, entries, second_looks_text, write_summary, write_table
from tests.sweep.session import Result, run_all
from tests.sweep.streams import Settings, fixed_cases, random_stream, settings_of, with_settings

MOST_DRAWN = 100_000
"""Of random cases, in case that none has the settings that are asked for."""


def main() -> int:
    """Run what the arguments ask for."""
    arguments = _parser().parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    digest = sources_digest()
    seed = seed_of_the_sources() if arguments.seed is None else arguments.seed
    cases = [] if arguments.table else _chosen(arguments, seed)
    if arguments.new:
        known = entries(digest)
        cases = [case for case in cases if case.id not in known]
    kinds: dict[str, str] = {}
    first_kinds: dict[str, str] = {}
    surprising: dict[str, Case] = {}
    started = time.monotonic()
    OUTCOMES.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="sweep-") as directory, OUTCOMES.open("a") as outcomes:
        make_material(Path(directory))

        def done(result: Result) -> None:
            is_wrong = result.judgement.kind in WRONG
            kinds[result.case.id] = result.judgement.kind
            if is_wrong:
                surprising[result.case.id] = result.case
            look = 2 if result.case.id in first_kinds else 1
            print(json.dumps({**result.entry(look), "sources": digest}), file=outcomes, flush=True)
            if is_wrong or arguments.verbose:
                print(result.text(), flush=True)
            if arguments.only:
                print(json.dumps(result.case.spec(), indent=2))
                print(f"verdict: {result.verdict}\nobserved: {result.observation}")

        stop = math.inf if arguments.seconds is None else started + arguments.seconds
        if arguments.table:
            _run_table(Path(directory), arguments.workers, done, stop)
        else:
            run_all(cases, Path(directory), arguments.workers, done, stop)
        if surprising:
            # A gang can also be late or short of memory on a busy machine, which a second look tells from a wrong verdict.
            print(f"a second look at {len(surprising)}", flush=True)
            first_kinds = {identifier: kinds[identifier] for identifier in surprising}
            run_all(list(surprising.values()), Path(directory), 1, done, stop)
    counts = Counter(kinds.values())
    print(f"seed {seed}; {len(kinds)} distinct combinations in {time.monotonic() - started:.0f} s")
    print(f"accepted and working {counts['accepted']}, refused as said {counts['refused']}, on principle {counts['policy']}")
    print(
        f"false accepts {counts['false accept']}, false refusals {counts['false refusal']}, unexplained {counts['unexplained']}"
    )
    print(second_looks_text(first_kinds, kinds))
    refusing = [rule.id for rule in RULES if rule.severity == "error"]
    print(
        f"{sum(map(is_never_false, refusing))} of {len(refusing)} rules that refuse were not judged: they have tests of their own"
    )
    if arguments.record:
        print(f"recorded in {write_table(digest) if arguments.table else write_summary(digest, [seed])}")
    return int(any(counts[kind] for kind in WRONG))


def _run_table(material: Path, workers: int, done: Callable[[Result], None], stop: float) -> None:
    """Each row's attempts until one works."""
    answered: set[tuple[str, str]] = set()
    for attempt in ATTEMPTS:
        wanted = table_cases(attempt, answered)
        keys = {case.id: key for key, case in wanted.items()}

        def noted(result: Result, keys: dict[str, tuple[str, str]] = keys) -> None:
            done(result)
            if result.judgement.kind == "accepted" or "method-not-supported" in (result.verdict.ids if result.verdict else ()):
                answered.add(keys[result.case.id])

        run_all(list(wanted.values()), material, workers, noted, stop)


def _chosen(arguments: argparse.Namespace, seed: int) -> list[Case]:
    if arguments.only:
        entry = entries(None).get(arguments.only)
        if entry is None:
            raise SystemExit(f"{arguments.only} is not among {OUTCOMES}")
        return [Case(entry["values"])]
    if arguments.again:
        return [Case(entry["values"]) for entry in entries(None).values() if entry["kind"] in WRONG]
    cases: list[Case] = []
    if arguments.slice != "random":
        count = arguments.count if arguments.slice == "fixed" else arguments.count // 2
        cases += itertools.islice(with_settings(fixed_cases(), arguments.where), arguments.first, arguments.first + count)
    if arguments.slice != "fixed":
        drawn = itertools.islice(random_stream(seed, {case.id for case in cases}), MOST_DRAWN)
        cases += itertools.islice(with_settings(drawn, arguments.where), arguments.count - len(cases))
    return cases


def _settings(text: str) -> Settings:
    try:
        return settings_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="combinations in all")
    parser.add_argument("--first", type=int, default=0, help="where in the fixed list to begin")
    parser.add_argument("--seed", type=int, help="of the random slice; unset: from the product's sources")
    parser.add_argument("--slice", choices=("fixed", "random", "both"), default="both")
    help_text = "only with one of these values of a dimension; may be given again"
    parser.add_argument("--where", action="append", default=[], type=_settings, metavar="NAME=VALUE,...", help=help_text)
    parser.add_argument("--workers", type=int, default=2, help="gangs of two ranks at a time")
    parser.add_argument("--seconds", type=float, help="begin no combination after so long")
    parser.add_argument("--only", metavar="ID", help="run one recorded combination again and show everything")
    parser.add_argument("--again", action="store_true", help="run what was recorded as judged wrongly, with whatever sources")
    parser.add_argument("--table", action="store_true", help="run what docs/reference/methods.md needs")
    parser.add_argument("--new", action="store_true", help="leave out what was run with these sources already")
    parser.add_argument("--record", action="store_true", help="write the summary of all that was run with these sources")
    parser.add_argument("--verbose", action="store_true", help="show right judgements, too")
    return parser


if __name__ == "__main__":
    sys.exit(main())

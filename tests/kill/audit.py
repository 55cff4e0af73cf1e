"""`python -m tests.kill.audit`: runs that somebody has changed, all digests included, are found by `finetune audit`.

Each try changes one record, the learning rate, a weight of the base or of the adapter, or plants a checkpoint of another run, and
has one interval drawn that the change can be seen in. One try in so many changes nothing, and one in so many is audited by the
program itself, which starts torchrun; the ranks of the others are forked. Try N of a seed always makes the same change.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console

from finetune_cli.commands import audit as command
from finetune_cli.local.replay import Interval, draw
from finetune_cli.local.run_directory import RunDirectory
from finetune_cli.render.audit import audit_document
from tests.support.audited_run import INTERVALS, TAMPERINGS, ForkedReplay, Tampering, audited_run, copied
from tests.support.source_seed import add_seed

REAL_EVERY = 25
UNTOUCHED = "nothing"
_EXPECTED = {UNTOUCHED: set(), "published adapter": {"audit-result-differs"}}


def main(argv: Sequence[str] | None = None) -> int:
    """Run all, print the table; 1 if any try was judged wrongly."""
    parser = argparse.ArgumentParser(prog="python -m tests.kill.audit", description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="number of the first try, to repeat one")
    add_seed(parser)
    arguments = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Ranks of all tries but the real ones are forked.
    vars(command)["Replay"] = ForkedReplay
    started = time.monotonic()
    tries: Counter[str] = Counter()
    right: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="audit-") as name:
        runs = audited_run(Path(name) / "own"), audited_run(Path(name) / "foreign", seed=4)
        for number in range(arguments.first, arguments.first + arguments.runs):
            kind, problem = _try(runs, Path(name) / "try", arguments.seed, number)
            tries[kind] += 1
            right[kind] += not problem
            print(f"try {number:>3} {kind}: {problem or 'right'}", flush=True)
    for kind in (*TAMPERINGS, UNTOUCHED):
        if tries[kind]:
            print(f"{kind:<20}{right[kind]:>4} of {tries[kind]}")
    minutes = (time.monotonic() - started) / 60
    print(f"{right.total()} of {tries.total()} tries were judged rightly; seed {arguments.seed}, {minutes:.1f} minutes")
    return 0 if right == tries else 1


def _try(runs: tuple[RunDirectory, RunDirectory], directory: Path, seed: int, number: int) -> tuple[str, str]:
    """What was changed, and what was wrong with the verdict; empty: nothing was."""
    random = Random(f"{seed}/{number}")
    kinds = [*TAMPERINGS, UNTOUCHED]
    kind = kinds[number % len(kinds)]
    try:
        place = copied(runs[0], directory)
        tampering = TAMPERINGS[kind](place, random, runs[1]) if kind in TAMPERINGS else Tampering("nothing was changed", ())
        drawn = random.choice(tampering.intervals or INTERVALS)
        document = _audited(place, drawn, is_real=number % REAL_EVERY == 0)
    finally:
        shutil.rmtree(directory)
    if document["intervals"] != [{"start": drawn.start, "end": drawn.end}]:
        return kind, f"{document['intervals']} were computed again instead of {drawn}"
    found = {finding["rule"] for finding in document["findings"]}
    expected = _EXPECTED.get(kind, {"audit-interval-differs"})
    is_right = found >= expected if expected else not found
    return kind, "" if is_right else f"{tampering.what}; {drawn} were computed again, and it found {sorted(found) or 'nothing'}"


def _audited(place: RunDirectory, drawn: Interval, *, is_real: bool) -> dict[str, Any]:
    seed = next(seed for seed in range(10_000) if draw(INTERVALS, 1, seed) == [drawn])
    if not is_real:
        order = command.AuditOrder(str(place.root), Path(), None, {}, None)
        with Path(os.devnull).open("w") as nowhere:
            return audit_document(command.audit(order, 1, seed, Console(file=nowhere)))
    arguments = ["audit", str(place.root), "--intervals", "1", "--seed", str(seed), "-o", "json"]
    done = subprocess.run([sys.executable, "-m", "finetune_cli", *arguments], stdout=subprocess.PIPE, check=False)
    return dict(json.loads(done.stdout or b'{"intervals": "nothing, because it failed"}'))


if __name__ == "__main__":
    sys.exit(main())

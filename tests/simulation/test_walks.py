"""Whatever happens in whatever order: the invariants hold, and every job comes to rest when the faults stop.

The walks run in a process of their own whose sets always have the same order, so that a failing one can be replayed:
`python -m tests.simulation --first SEED --steps N --shrink` finds the few steps that matter.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = 200
WALKS = 50
BATCHES = 2
"""One for each of two workers: every one imports the operator again."""


@pytest.mark.parametrize("batch", range(BATCHES))
def test_every_walk_keeps_the_invariants_and_comes_to_rest(batch: int) -> None:
    command = [sys.executable, "-m", "tests.simulation", "--steps", str(STEPS)]
    seeds = ["--first", str(batch * WALKS), "--seeds", str(WALKS)]
    done = subprocess.run([*command, *seeds], cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, (
        f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}\n" + "replay and shrink: " + " ".join([*command, "--first SEED --shrink"])
    )


def test_the_walks_of_a_run_have_twenty_thousand_steps() -> None:
    assert STEPS * WALKS * BATCHES >= 20_000

"""A tiny model, its data, and a job for them; tests spoil copies."""

import os

from tests.unit.finetune_trainer.preflight.conftest import claims, context, made_claims, manifest, model

# Otherwise the command line asks the Hub for the commit of each drawn repository.
os.environ["HF_HUB_OFFLINE"] = "1"
__all__ = ["claims", "context", "made_claims", "manifest", "model"]

EXHAUSTIVE = "HOSTILE_CASES"
"""Environment variable: how many times as many mutations as CI runs."""
FIRST = "HOSTILE_SEED"
"""Environment variable: the seed of the first mutation."""


def pytest_generate_tests(metafunc) -> None:
    """`seeds`: blocks of consecutive seeds, one test each."""
    if "seeds" in metafunc.fixturenames:
        times, first = int(os.environ.get(EXHAUSTIVE, "1")), int(os.environ.get(FIRST, "0"))
        count = metafunc.function.cases
        blocks = [range(first + block * count, first + (block + 1) * count) for block in range(times)]
        metafunc.parametrize("seeds", blocks, ids=str)

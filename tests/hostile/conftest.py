"""A tiny model, its data, and a job for them; tests spoil copies."""

from __future__ import annotations

import os

from tests.unit.trainer_preflight.conftest import claims, context, made_claims, manifest, model

__all__ = ["claims", "context", "made_claims", "manifest", "model"]

EXHAUSTIVE = "HOSTILE_CASES"
"""Environment variable: how many times as many mutations as CI runs."""


def pytest_generate_tests(metafunc) -> None:
    """`seeds`: blocks of consecutive seeds, one test each."""
    if "seeds" in metafunc.fixturenames:
        times = int(os.environ.get(EXHAUSTIVE, "1"))
        count = metafunc.function.cases
        metafunc.parametrize("seeds", [range(block * count, (block + 1) * count) for block in range(times)], ids=str)

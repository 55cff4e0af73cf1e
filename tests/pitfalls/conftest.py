from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pitfalls.cases import Case, save_base, train
from tests.pitfalls.ranks import RankResult, run_ranks


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("pitfalls"))


@pytest.fixture(scope="session")
def base_with_biases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("pitfalls"), attention_bias=True)


@pytest.fixture
def step(base: Path, tmp_path: Path) -> Callable[..., list[RankResult]]:
    """Train a case for a few steps on two ranks."""

    def run(case: Case, world_size: int = 2, model: Path = base) -> list[RankResult]:
        return run_ranks(train, case, str(model), directory=tmp_path, world_size=world_size)

    return run


@pytest.fixture
def fails(step: Callable[..., list[RankResult]]) -> Callable[..., None]:
    """Assert that a case ends with an exception that holds all of these texts."""

    def run(case: Case, *texts: str, **options: Any) -> None:
        errors = [result.error for result in step(case, **options) if result.failed]
        assert errors, f"{case} did not fail"
        assert all(text in errors[0] for text in texts), errors[0]

    return run


@pytest.fixture
def learns(step: Callable[..., list[RankResult]]) -> Callable[..., list[RankResult]]:
    """Assert that a case trains: no exception, and the loss falls on both ranks."""

    def run(case: Case, **options: Any) -> list[RankResult]:
        results = step(case, **options)
        for result in results:
            assert not result.failed, result.trace
            assert result.value["losses"][-1] < result.value["losses"][0] - 0.05, result.value
        return results

    return run

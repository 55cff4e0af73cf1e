"""What a benchmark of the operator's pace says of its thresholds."""

import json
from pathlib import Path

import pytest

from bench.operator_pace import report


@pytest.fixture(autouse=True)
def thresholds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "thresholds.json"
    path.write_text(json.dumps({"any": {"burst.cpu": 40}, "1000": {"burst.first_child.p50": 5}}))
    monkeypatch.setattr(report, "THRESHOLDS", path)


def test_figure_above_its_threshold_is_named() -> None:
    assert report.exceeded({"burst": {"cpu": 40.0}}, 20) == []
    assert report.exceeded({"burst": {"cpu": 41.0}}, 20) == ["burst.cpu is 41, and may be 40 at most"]


def test_threshold_of_another_number_of_jobs_does_not_hold() -> None:
    results = {"burst": {"cpu": 1.0, "first_child": {"p50": 6.0}}}
    assert report.exceeded(results, 20) == []
    assert report.exceeded(results, 1000) == ["burst.first_child.p50 is 6, and may be 5 at most"]


@pytest.mark.parametrize("results", [{}, {"burst": {"cpu": float("nan")}}, {"burst": {"cpu": "41"}}])
def test_figure_that_was_not_measured_is_not_kept(results: dict[str, object]) -> None:
    assert report.exceeded(results, 20) == ["burst.cpu is nan, and may be 40 at most"]


def test_table_shows_every_figure_with_its_threshold() -> None:
    lines = report.table({"burst": {"cpu": 12.5, "calls": {"create jobs": 3}}}, 20).splitlines()
    assert [line.split() for line in lines] == [
        ["figure", "measured", "at", "most"],
        ["burst.cpu", "12.500", "40"],
        ["burst.calls.create", "jobs", "3.000"],
    ]

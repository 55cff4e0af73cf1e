"""The benchmark of the operator's pace runs from start to end with a few jobs; how fast they are says nothing."""

import json
from pathlib import Path

import pytest

from bench.operator_pace import __main__ as pace


def test_a_few_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(pace, "RESULTS", tmp_path / "operator.json")
    arguments = ("--jobs", "2", "--idle-seconds", "1", "--steady-seconds", "1", "--rate", "2", "--without-thresholds")
    monkeypatch.setattr("sys.argv", ["operator_pace", *arguments, "--keep-results"])
    assert pace.main() == 0
    figures = json.loads((tmp_path / "operator.json").read_text())["2"]
    # Each scenario has said something, and the operator has outlived its API server.
    assert list(figures) == ["floor", "burst", "restart", "pending", "steady", "bounce", "machine"]
    assert figures["bounce"]["operator_survived"] is True
    assert figures["burst"]["children_per_life"] > 0
    assert "burst.children_per_life " in capsys.readouterr().out

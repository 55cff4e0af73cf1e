"""The benchmark of contenders within `make gpu-check`: what it would do on a device, with no device."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu import __main__ as benchmark
from bench.gpu import speed
from bench.gpu.calculated import Calculated, calculated
from bench.gpu.contender import OURS, SIZES
from bench.gpu.scale import Rows, Scale

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
COMPILATION, START_AND_END = 45.0, 60.0
"""Seconds: the first step took an H200 22 s compiled, and half a minute was all that a run without compilation took."""
DEVICE = Scale(torch.device("cuda"), 1)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the benchmark is called with, on a device of 79 GiB unless `has` says otherwise."""
    found: list[list[str]] = []
    monkeypatch.setattr(speed, "benchmark", SimpleNamespace(main=lambda options: found.append(options) or 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: H100)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(total_memory=79 << 30))
    monkeypatch.delenv("GPU_CHECK_MODELS", raising=False)
    return found


@pytest.mark.parametrize("device", [H100, H200])
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("size", ["8B", "8B-32k", "8B-128k"])
def test_every_run_is_over_before_it_is_ended(size: str, name: str, device: str) -> None:
    """Six steps of 131,072 tokens, of a minute each, would not have been over after 150 s."""
    found = calculated(name, size, 1, device)
    assert found is not None
    compiles = COMPILATION if OURS[name].get("compile") else 0.0
    seconds = SIZES[size]["steps"] * found.step_seconds + compiles + START_AND_END
    assert seconds < speed.RUN_SECONDS[size]


def test_what_a_device_does_not_hold_is_told_and_not_tried(asked: list[list[str]]) -> None:
    """An 8B Llama at 131,072 tokens needs 84 GiB compiled; at 32,768 tokens 35."""
    rows: Rows = []
    assert speed.longest(DEVICE, rows) == ""
    assert asked == []
    assert [(row["contender"], row["GiB"], row["not shown"]) for row in rows] == [("compiled", 84.1, "it needs more memory")]
    rows.clear()
    assert speed.long(DEVICE, rows) == ""
    (options,) = asked
    assert options[options.index("--contenders") :] == ["--contenders", "ours", "compiled"]
    assert rows == [{"size": "8B-32k", "exit code": 0}]


def test_a_device_of_which_nothing_is_known_tries_all(asked: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA X900")
    assert speed.longest(DEVICE, []) == ""
    assert len(asked) == 1


def test_models_are_made_once_for_all_tiers(asked: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPU_CHECK_MODELS", str(tmp_path))
    for tier in (speed.throughput, speed.settings, speed.long):
        tier(DEVICE, [])
    assert {options[options.index("--models") + 1] for options in asked} == {str(tmp_path / "8B")}
    # Each keeps its figures in a file of its own.
    records = [options[options.index("--record") + 1] if "--record" in options else options[1] for options in asked]
    assert len(set(records)) == 3


@pytest.mark.parametrize(
    ("name", "tokens", "gigabytes"),
    # As measured on an H200 (bench/results/gpu/speed.json), less 0.27 GB that the trainer no longer takes.
    [("ours", 11_772, 67.65 - 0.27), ("compiled", 14_920, 55.9 - 0.27), ("deterministic", 11_593, 67.65 - 0.27)],
)
def test_what_is_calculated_for_the_measured_device(name: str, tokens: float, gigabytes: float) -> None:
    found = calculated(name, "8B", 1, H200)
    assert found is not None
    assert found.tokens_per_second == pytest.approx(tokens, rel=0.05)
    assert found.peak_memory_bytes / 1e9 == pytest.approx(gigabytes, rel=0.005)


def test_other_trainers_and_other_devices_have_no_calculation() -> None:
    assert calculated("trl", "8B", 1, H200) is None
    assert calculated("ours", "8B", 1, "cpu") is None


def test_errors_of_the_planner_stand_next_to_each_measured_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run: dict[str, Any] = {"tokens_per_second": 10_000.0, "loss": 2.0, "peak_memory_bytes": 50 * 10**9, "device": H200}
    expected = Calculated(11_000.0, 1.5, 48 * 10**9, 0)
    shown = benchmark.line("ours", [run], 4e10, 1, expected)
    assert "10000 tokens/s (10000 to 10000), calculated 11000 (+10.0%), MFU 40.4%, " in shown
    assert "peak memory 50.0 GB, planned 48.0 GB (-4.0%), loss 2.0000" in shown
    assert re.search(r"tokens/s \(10000 to 10000\), MFU", benchmark.line("trl", [run], 4e10, 1, None))
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path)
    benchmark.keep("settings-8B", "8B", 1, {"deterministic": [run], "trl": [run], "compiled": []})
    kept = json.loads((tmp_path / "settings-8B.json").read_text())
    assert list(kept["calculated"]) == ["deterministic"]
    assert kept["runs"]["trl"] == [run]

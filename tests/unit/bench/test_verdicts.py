"""What benchmarks make of figures that were measured: rates, what makes them void, targets, and which record they replace."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bench.merge import __main__ as merge
from bench.trainer import __main__ as trainer


def run(monkeypatch: pytest.MonkeyPatch, benchmark: ModuleType, *arguments: str) -> int:
    """As the command is called."""
    monkeypatch.setattr("sys.argv", [benchmark.__name__, *arguments])
    code: int = benchmark.main()
    return code


def run_of(loss: float, seconds: float, tokens: int = 400) -> dict[str, object]:
    """Figures of one rank: two steps to warm up, and two."""
    starts = [0.0, 9.0, 10.0, 10.0 + seconds / 2, 10.0 + seconds]
    return {
        "starts": starts, "busy": [each / 2 for each in starts], "losses": [9.0, loss, loss, loss], "peak_resident_bytes": 10**9,
        "supervised_tokens": tokens,
    }  # fmt: skip


def test_rates_of_training_and_what_makes_them_void(capsys: pytest.CaptureFixture[str]) -> None:
    counts = [[100, 100]] * 4
    ours = trainer.evaluated("ours", [run_of(5.0, 2.0)], counts)
    bare = trainer.evaluated("bare", [run_of(5.2, 4.0)], counts)
    # 200 tokens in the two steps that count.
    assert (ours["tokens_per_second"], ours["tokens_per_cpu_second"], ours["final_loss"]) == (100.0, 200.0, 5.0)
    assert bare["tokens_per_second"] == 50.0
    assert trainer.problems({"ours": [ours], "bare": [bare]}) == ["final loss 5.0000 is not the bare loop's 5.2000 within 3%"]
    short = trainer.evaluated("ours", [run_of(5.1, 2.0, tokens=399)], counts)
    assert trainer.problems({"ours": [short], "bare": [bare]}) == ["ours trained 399 supervised_tokens, expected 400"]
    contenders = {"ours": trainer.summary([ours]), "bare": trainer.summary([bare])}
    trainer.show({"contenders": contenders, "problems": ["one"]}, trainer.verdicts(contenders), 1, 2)
    shown = capsys.readouterr().out
    assert "ours / bare, tokens_per_second: median 2.000 (2.000 to 2.000)" in shown
    assert "reached: our speed relative to the bare loop's is 2.000, the target is at least 0.97" in shown
    assert "PROBLEM: one" in shown


def rates(*seconds: float) -> dict[str, object]:
    """What a contender's runs of 200 tokens come to."""
    return {"tokens_per_second": [200 / each for each in seconds], "tokens_per_cpu_second": [1.0] * len(seconds)}


@pytest.mark.parametrize(
    ("ours", "bare", "trl", "figures", "reached"),
    [
        # 0.98 and 1.02, by the median of runs next to each other: a slow one decides nothing.
        ((1.0, 1.0, 9.0), (0.98, 0.98, 0.98), (1.02, 1.02, 1.02), [1.02, 0.98], [True, True]),
        ((1.0, 1.0, 1.0), (0.97, 0.97, 0.97), (1.0, 1.0, 1.0), [1.0, 0.97], [False, True]),
        ((1.0, 1.0, 1.0), (0.96, 0.96, 2.0), (0.9, 2.0, 0.9), [0.9, 0.96], [False, False]),
    ],
)
def test_the_targets_of_training(ours: Any, bare: Any, trl: Any, figures: list[float], reached: list[bool]) -> None:
    found = trainer.verdicts({"ours": rates(*ours), "bare": rates(*bare), "trl": rates(*trl)})
    assert [verdict.figure for verdict in found] == pytest.approx(figures)
    assert [verdict.is_reached for verdict in found] == reached
    assert trainer.verdicts({"ours": rates(*ours), "ordered": rates(*ours)}) == []
    assert trainer.verdicts({"bare": rates(*bare), "trl": rates(*trl)}) == []


def figures_of_a_contender(name: str, seconds: float) -> dict[str, object]:
    return trainer.evaluated(name, [run_of(5.0, seconds) | {"tokens": 400}], [[100, 100]] * 4)


def test_training_that_misses_a_target_fails_once_all_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trainer, "RESULTS", tmp_path)
    monkeypatch.setattr(trainer, "run_once", lambda name, *_: figures_of_a_contender(name, 2.0 if name == "ours" else 1.9))
    assert run(monkeypatch, trainer, "--runs", "1", "--micro-batch", "2", "1") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trainer-LoRA-1.json", "trainer-LoRA-2.json"]
    assert capsys.readouterr().out.count("MISSED: our speed relative to TRL's is 0.950, the target is more than 1") == 4
    verdicts = json.loads((tmp_path / "trainer-LoRA-1.json").read_text())["worlds"]["2"]["verdicts"]
    assert [(verdict["figure"], verdict["is_reached"]) for verdict in verdicts] == [(pytest.approx(0.95, rel=1e-3), False)] * 2
    # A toy's speed says nothing.
    assert run(monkeypatch, trainer, "--runs", "1", "--toy") == 0


def merged(parameters: str, speedup: float | None, seconds: float | None) -> dict[str, Any]:
    verification = {"alone": {"median_seconds": 1.0}, "with the merge": {"median_seconds": seconds}}
    return {
        "parameters": parameters,
        "speedup_over_peft": None if speedup is None else {"median": speedup, "min": 0.1, "max": 9.0},
        "verification": None if seconds is None else verification,
        "different_tensors": [],
    }


@pytest.mark.parametrize(
    ("result", "lines", "code"),
    [
        (
            merged("1.1B", 4.0, 15.0),
            [
                "reached: 1.1B: the speedup over PEFT is 4.000, the target is at least 4",
                "reached: 1.1B: seconds of a merge with its verification is 15.000, the target is at most 15",
            ],
            0,
        ),
        (
            merged("1.1B", 3.99, 15.01),
            [
                "MISSED: 1.1B: the speedup over PEFT is 3.990, the target is at least 4",
                "MISSED: 1.1B: seconds of a merge with its verification is 15.010, the target is at most 15",
            ],
            1,
        ),
        (
            merged("Qwen2 0.5B", 3.9, 60.0),
            ["MISSED: Qwen2 0.5B: the speedup over PEFT is 3.900, the target is at least 4"],
            1,
        ),
        (
            merged("GPT-2 medium", 4.1, 60.0),
            ["reached: GPT-2 medium: the speedup over PEFT is 4.100, the target is at least 4"],
            0,
        ),
        (merged("1.1B", None, None), [], 0),
        (merged("7B", None, 60.0), [], 0),
        (merged("toy", 0.5, 60.0), [], 0),
    ],
)
def test_the_targets_of_merging(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    result: dict[str, Any],
    lines: list[str],
    code: int,
) -> None:
    monkeypatch.setattr(merge, "RESULTS", tmp_path)
    monkeypatch.setattr(merge, "measure", lambda *_: dict(result))
    monkeypatch.setattr(merge, "require_space", lambda *_: None)
    monkeypatch.setattr(merge, "print_result", lambda _: None)
    assert run(monkeypatch, merge, "--parameters", result["parameters"]) == code
    assert capsys.readouterr().out.splitlines() == lines
    (record,) = tmp_path.iterdir()
    assert [verdict["is_reached"] for verdict in json.loads(record.read_text())["verdicts"]] == [
        line.startswith("reached") for line in lines
    ]

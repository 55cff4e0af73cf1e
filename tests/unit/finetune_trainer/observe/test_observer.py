"""What rank 0 writes while the loop runs, and that the other ranks write nothing."""

import json
import time
import urllib.request
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finetune_trainer.checkpoint.manifest import RunState
from finetune_trainer.json_lines import read_lines
from finetune_trainer.observe.goodput import Activity
from finetune_trainer.observe.observer import ObservedRun, Observer, Reporter, StepDone, calculated_tokens_per_second, observing
from finetune_trainer.observe.run_files import Stopwatch
from finetune_trainer.observe.steps import StepResult
from finetune_trainer.ranks.device_test import DeviceFigures
from finetune_trainer.ranks.gang import Gang
from tests.support.tiny_model import run_context, tiny_spec

CPU = torch.device("cpu")
RESULT = StepResult(
    loss=2.0,
    gradient_norm=0.5,
    supervised_tokens=60,
    tokens=100,
    squared_document_lengths=1000,
    data_seconds=0.5,
    compute_seconds=(1.0, 3.0),
    stop=False,
    loss_scale=1.0,
)


def observed(tmp_path: Path, rank: int = 0) -> ObservedRun:
    checkpoints: Any = SimpleNamespace(complete_step=lambda: None, failed_saves=0)
    context = run_context(tmp_path, tiny_spec())
    gang = Gang(rank, 2, rank, CPU, None)
    return ObservedRun(context, context.plan, None, gang, 12, 10, first_step=0, is_resumed=False, checkpoints=checkpoints)


def done(step: int) -> StepDone:
    return StepDone(step, 0.001, 2.0, RESULT, RunState(), was_evaluated=False, peak_memory_bytes=None, is_saved=True)


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    run = observed(tmp_path, rank=1)
    with observing(run, RunState(), Stopwatch(0.0), 0, lambda: False) as observer:
        with observer.during(Activity.STEPS):
            observer.stepped(done(1))
        assert type(observer) is Observer
        assert observer.facts() == {}
    assert not run.context.workspace.history.exists()
    assert not (run.context.workspace.root / "observe.json").exists()


def test_a_step_is_in_the_history_and_in_the_answers(tmp_path: Path) -> None:
    run = observed(tmp_path)
    # Of 12 sequences, 6 to a step: preflight has chosen another batch than the 4 of the manifest.
    run = replace(run, plan=run.plan.with_training(global_batch_size=6))
    with observing(run, RunState(), Stopwatch(0.0), 0, lambda: False) as observer:
        assert isinstance(observer, Reporter)
        with observer.during(Activity.STEPS):
            pass
        observer.stepped(done(1))
        port = json.loads((run.context.workspace.root / "observe.json").read_text())["port"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/progress", timeout=30) as response:
            progress = json.loads(response.read())
        facts = observer.facts()
    (line,) = read_lines(run.context.workspace.history.read_text())
    expected = {"step": 1, "epoch": 0.5, "loss": 2.0, "tokens": 100, "supervised_tokens": 60, "tokens_per_second": 50.0}
    assert {name: line[name] for name in expected} == expected
    assert "eval_loss" not in line
    assert (progress["step"], progress["loss"], progress["gradient_norm"]) == (1, 2.0, 0.5)
    assert progress["checkpoint_interval_seconds"] == 4.0, "every 2 steps of 2 seconds"
    assert facts["tokens"] == "100"
    assert float(facts["seconds"]) >= 0


def test_work_is_compared_with_what_the_device_has_reached(tmp_path: Path) -> None:
    shares = []
    for number, flops in enumerate((1e9, 2e9)):
        run = replace(observed(tmp_path / str(number)), reached=DeviceFigures(flops, 1.0, slowest_share=0.5))
        with observing(run, RunState(), Stopwatch(0.0), 0, lambda: False) as observer:
            observer.stepped(done(1))
            facts = observer.facts()
        assert "mfu" not in facts, "of a CPU no peak is known"
        assert facts["slowest_device_ratio"] == "0.5"
        shares.append(float(facts["reached_flops_ratio"]))
    assert shares[0] == pytest.approx(2 * shares[1])
    assert shares[1] > 0


def test_the_planner_s_pace_is_that_of_the_device_of_rank_0(tmp_path: Path) -> None:
    context = run_context(tmp_path, tiny_spec(model={"attention": "varlen"}), dtype=torch.bfloat16)
    slow, fast = (calculated_tokens_per_second(context.plan, context.base_model, name) for name in ("NVIDIA L4", "NVIDIA H100"))
    assert slow is not None
    assert fast is not None
    assert fast > slow > 0
    assert calculated_tokens_per_second(context.plan, context.base_model, "") is None
    assert calculated_tokens_per_second(context.plan, tmp_path, "NVIDIA H100") is None


def test_the_age_of_the_checkpoint_counts_from_the_start_or_from_when_it_was_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete, clock = [None], [1000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    checkpoints: Any = SimpleNamespace(complete_step=lambda: complete[0], failed_saves=0)
    run_metrics: list[Any] = []
    monkeypatch.setattr("finetune_trainer.observe.observer.serving", lambda made, _: run_metrics.append(made) or nullcontext(0))
    with observing(
        replace(observed(tmp_path), checkpoints=checkpoints), RunState(), Stopwatch(0.0), 0, lambda: False
    ) as observer:
        for seconds, step, expected in ((10, None, 1000), (20, 2, 1020), (30, 2, 1020), (40, 4, 1040)):
            clock[0], complete[0] = 1000.0 + seconds, step
            observer.stepped(done(step or 1))
            assert run_metrics[0].progress.checkpoint_time == expected


def test_a_run_that_fails_still_leaves_its_last_record(tmp_path: Path) -> None:
    run = observed(tmp_path)

    def fail_after_a_step() -> None:
        with observing(run, RunState(), Stopwatch(0.0), 0, lambda: False) as observer:
            observer.stepped(done(1))
            raise RuntimeError("no luck")

    with pytest.raises(RuntimeError, match="no luck"):
        fail_after_a_step()
    records = read_lines(run.context.workspace.accounts.read_text())
    assert (records[0]["kind"], records[-1]["kind"], records[-1]["step"]) == ("started", "spent", 1)


def test_the_interval_between_saves_follows_what_was_lost(tmp_path: Path) -> None:
    """Attempt 0 was killed after 98 s and two saves of 2 s each; by hand: Young's 19.8 s and Daly's correction."""
    spec = tiny_spec(checkpoint={"adaptive": True})
    run = replace(observed(tmp_path), context=run_context(tmp_path, spec), first_step=5, is_resumed=True)
    accounts = run.context.workspace.accounts
    accounts.parent.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = [
        {"kind": "started", "attempt": 0, "time": 0.0, "step": 0},
        {"kind": "spent", "attempt": 0, "time": 98.0, "step": 6, "seconds": {"steps": 94.0, "checkpoint": 4.0}, "num_saves": 2},
    ]
    accounts.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    now = [0.0]
    with observing(run, RunState(), Stopwatch(0.0, lambda: now[0]), 0, lambda: False) as observer:
        assert observer.interval_for_losses() == pytest.approx(19.80 * (1 + (1 / 98) ** 0.5 / 3 + 1 / 98 / 9) - 2, abs=0.01)
        now[0] += 300
        assert observer.interval_for_losses() == pytest.approx(39.90 * 1.0170 - 2, abs=0.02), "398 s have passed with one loss"
        observer.saved()
        observer.stepped(done(6))
        port = json.loads((run.context.workspace.root / "observe.json").read_text())["port"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/progress", timeout=30) as response:
            assert json.loads(response.read())["checkpoint_interval_seconds"] == 4.0, "every 2 steps is more often"


def test_a_run_that_has_lost_nothing_has_no_interval_of_its_own(tmp_path: Path) -> None:
    with observing(observed(tmp_path), RunState(), Stopwatch(0.0), 0, lambda: False) as observer:
        observer.stepped(done(1))
        assert observer.interval_for_losses() is None
    assert Observer().interval_for_losses() is None
    accounts = read_lines(observed(tmp_path).context.workspace.accounts.read_text())
    assert (accounts[-1]["num_saves"], accounts[-1]["is_last"]) == (0, True)

"""Whole runs with scripted held-out losses: early stopping, the best checkpoint, and what is told, undisturbed and after a
kill."""

import logging
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import pytest
import torch

from finetune_job.failures import EXIT_CODES, FailureClass, TerminationReport
from finetune_job.layout import checkpoint_step
from finetune_job.plan.run_plan import PRECISION_FIELD, RECOMPUTATION_FIELD, Choice, RunPlan
from finetune_job.progress import Progress
from finetune_trainer.checkpoint.load import full_parameters
from finetune_trainer.checkpoint.manifest import RunState, read_manifest
from finetune_trainer.checkpoint.retention import checkpoint_directories
from finetune_trainer.context import RunContext
from finetune_trainer.json_lines import read_lines
from finetune_trainer.observe.goodput import AttemptStarted, Cause, TimeSpent, goodput_totals, parse_records
from finetune_trainer.ranks.reports import rank_report_name
from tests.support.forked_ranks import Disturbance, Fault, run_gang, trained_files, wrap
from tests.support.tiny_model import GPU_PROFILE, run_context, tiny_spec, write_model_report

TOTAL, STOP, BEST = 12, 8, 4
LOSSES = {0: 1.0, 2: 5.0, 4: 4.0, 6: 4.5, 8: 3.75 + 0.5, 10: 0.5, 12: 0.25}
"""By step. With patience 2 the run ends after step 8, its best checkpoint is that of step 4; step 10 is never seen."""
SPEC = tiny_spec(
    training={"maxSteps": TOTAL},
    checkpoint={"everySteps": 3, "keep": 2, "adaptive": True},
    evaluation={"everySteps": 2, "earlyStopping": {"patience": 2, "minDelta": "0.5"}, "loadBestModelAtEnd": True},
)


@dataclass(frozen=True)
class ScriptedLosses:
    """Held-out losses by step, in place of what was measured."""

    by_step: tuple[tuple[int, float], ...] = tuple(LOSSES.items())

    def arm(self, rank: int) -> None:
        losses = dict(self.by_step)

        def judged(original: Callable[..., Any], state: RunState, step: int, _loss: float, *rest: Any) -> Any:
            return original(state, step, losses[step], *rest)

        wrap("train.policy:after_evaluation", judged)


@dataclass(frozen=True)
class NotANumber:
    """The second evaluation gives no number."""

    def arm(self, rank: int) -> None:
        results = iter([5.0, math.nan])
        wrap("train.run:held_out_loss", lambda original, *_arguments, **_named: next(results))


@dataclass(frozen=True)
class LossesCallForSaves:
    """If anything was lost, the interval between saves is none."""

    def arm(self, rank: int) -> None:
        wrap("observe.observer:best_interval", lambda original, *_arguments: 0.0)


@dataclass(frozen=True)
class Noted:
    """Keeps what each rank is told of preflight's choices."""

    directory: Path

    def arm(self, rank: int) -> None:
        def noted(original: Callable[..., Any], plan: RunPlan, *rest: Any) -> Any:
            with (self.directory / f"chosen-{rank}").open("a") as file:
                file.write(f"{plan.parallelism.fsdp.reshard_after_forward}/{plan.training.activation_checkpointing} ")
            return original(plan, *rest)

        wrap("train.run:build", noted)


@dataclass(frozen=True)
class Said:
    """Keeps what the first rank says of its run."""

    directory: Path

    def arm(self, rank: int) -> None:
        if rank == 0:
            logger = logging.getLogger("finetune_trainer.train.run")
            logger.setLevel(logging.INFO)
            logger.addHandler(logging.FileHandler(self.directory / "said"))


def run(context: RunContext, *disturbances: Disturbance) -> list[int]:
    return run_gang(context, [ScriptedLosses(), *disturbances])


def report_of(context: RunContext) -> TerminationReport:
    path = context.workspace.reports("train", context.attempt) / rank_report_name(0)
    return TerminationReport.model_validate_json(path.read_text())


def history_of(context: RunContext) -> list[dict[str, Any]]:
    return read_lines(context.workspace.history.read_text())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    directory = tmp_path_factory.mktemp("undisturbed")
    context = run_context(directory, SPEC)
    assert run(context, Noted(directory), Said(directory)) == [0, 0]
    assert [(directory / f"chosen-{rank}").read_text() for rank in (0, 1)] == ["True/None "] * 2
    return context


def test_a_start_at_step_0_is_said(undisturbed: RunContext) -> None:
    said = (undisturbed.claims_root / "said").read_text().splitlines()
    assert said[0] == "starting at step 0 of 12: the workspace holds no checkpoint of this run"


def test_a_run_that_no_longer_gets_better_ends_well_with_its_best_checkpoint(undisturbed: RunContext) -> None:
    report = report_of(undisturbed)
    facts = report.facts
    assert (facts["stopped_early_at"], facts["exported_step"]) == (str(STOP), str(BEST))
    assert (facts["step"], facts["total_steps"], facts["best_eval_loss"]) == (str(STOP), str(TOTAL), "4.0")
    assert [line["step"] for line in history_of(undisturbed)] == list(range(STOP + 1))
    assert {line["step"]: line["eval_loss"] for line in history_of(undisturbed) if "eval_loss" in line} == {
        step: loss for step, loss in LOSSES.items() if step <= STOP
    }


def test_the_history_names_the_newest_checkpoint_that_was_complete(undisturbed: RunContext) -> None:
    """A resumed run that finds none of them asks it (checkpoint/evidence.py)."""
    known = {line["step"]: line.get("checkpoint_step") for line in history_of(undisturbed)}
    assert known[1] is None
    saved = [step for step in known.values() if step is not None]
    assert saved == sorted(saved)
    assert all(step is None or step < line for line, step in known.items())
    complete = {checkpoint_step(path.name) for path in checkpoint_directories(undisturbed.workspace.checkpoints)}
    assert set(saved) & complete


def test_facts_of_the_report_are_the_last_progress_and_where_the_time_went(undisturbed: RunContext) -> None:
    report = report_of(undisturbed)
    progress = Progress.model_validate({**report.facts, "attempt": 0})
    lines = history_of(undisturbed)
    assert progress.loss == lines[-1]["loss"]
    assert report.facts["tokens"] == str(sum(line.get("tokens", 0) for line in lines))
    found = goodput_totals(parse_records(read_lines(undisturbed.workspace.accounts.read_text())))
    assert progress.goodput == pytest.approx(found.goodput, abs=0.05)
    assert set(found.badput_seconds) == {Cause(name.partition(".")[2]) for name in report.facts if name.startswith("badput.")}
    spent = (Cause.STARTUP, Cause.EVALUATION, Cause.CHECKPOINT, Cause.EXPORT)
    assert all(found.badput_seconds[cause] > 0 for cause in spent)
    assert 0 < found.productive_seconds < sum(line["seconds"] for line in lines if "seconds" in line) + 1e-6
    assert progress.peak_memory_bytes is not None
    assert progress.peak_memory_bytes > 2**20
    assert progress.mfu is None


DISTURBANCES = [
    Fault("train.policy:after_evaluation", call=4, rank=1),
    Fault("train.step:seed_forward_pass", call=11, rank=1, signal=SIGTERM),
]
"""After the evaluation of step 6; asked to stop in step 6. The kill suite draws other moments."""


@pytest.mark.parametrize("fault", DISTURBANCES, ids=str)
def test_a_resumed_run_decides_as_the_undisturbed_one(undisturbed: RunContext, tmp_path: Path, fault: Fault) -> None:
    """With parameters that stay gathered, and recomputation, as preflight chose; the undisturbed run, for which nobody chose,
    frees the ones and keeps what the other computes again. An adaptive interval saves each step once something was lost.
    """
    context = run_context(tmp_path, SPEC)
    full = Choice(field=RECOMPUTATION_FIELD, value="Full", reason="")
    write_model_report(context, reshard_after_forward=False, batches=[full])
    codes = run(context, fault, Noted(tmp_path))
    assert codes[fault.rank] == (-SIGKILL if fault.signal == SIGKILL else EXIT_CODES[FailureClass.PREEMPTED])
    assert run(context, Noted(tmp_path), Said(tmp_path), LossesCallForSaves()) == [0, 0]
    assert (tmp_path / "said").read_text().startswith("resuming after step ")
    assert [(tmp_path / f"chosen-{rank}").read_text() for rank in (0, 1)] == ["False/Full False/Full "] * 2
    facts, expected = report_of(context).facts, report_of(undisturbed).facts
    same = ("stopped_early_at", "exported_step", "best_eval_loss", "eval_loss", "loss", "step", "tokens", "adapter_sha256")
    assert {name: facts[name] for name in same} == {name: expected[name] for name in same}
    assert trained_files(context) == trained_files(undisturbed)
    assert [line["step"] for line in history_of(context)] == list(range(STOP + 1))
    records = parse_records(read_lines(context.workspace.accounts.read_text()))
    found = goodput_totals(records)
    (*_, begun), ended = (each for each in records if isinstance(each, AttemptStarted)), records[-1]
    assert isinstance(ended, TimeSpent)
    assert ended.is_last
    # What stopped on request had saved: no loss, so only the last step is saved.
    assert ended.num_saves == (1 if fault.signal == SIGTERM else STOP - begun.step)
    assert found.total_seconds == pytest.approx(records[-1].time - records[0].time)
    assert found.badput_seconds[Cause.BETWEEN_ATTEMPTS] > 0


def test_a_rank_computes_in_the_precision_that_preflight_chose_if_nothing_else_is_left_open(tmp_path: Path) -> None:
    results = []
    for written, batches in (
        ({"precision": "bf16"}, []),
        ({}, [Choice(field=PRECISION_FIELD, value="bf16", reason="")]),
        ({}, [Choice(field=PRECISION_FIELD, value="bfloat16", reason="")]),
    ):
        spec = tiny_spec(
            model={"source": "pvc://models/tiny", "attention": "sdpa"},
            method={"type": "DoRA", "lora": {"r": 4}},
            training={"maxSteps": 2, "activationCheckpointing": "None", **written},
            parallelism={"processesPerNode": 1},
        )
        context = run_context(tmp_path / str(len(results)), spec, dtype=torch.bfloat16, profile=GPU_PROFILE)
        write_model_report(context, reshard_after_forward=True, batches=batches)
        assert run_gang(context) == [0]
        results.append(trained_files(context)["adapter_model.safetensors"])
    assert results[0] == results[1] != results[2]


def test_a_held_out_loss_that_is_no_number_ends_the_run_with_its_step(tmp_path: Path) -> None:
    context = run_context(tmp_path, tiny_spec(parallelism={"processesPerNode": 1}, evaluation={"everySteps": 2}))
    assert run_gang(context, [NotANumber()]) == [EXIT_CODES[FailureClass.NON_FINITE]]
    report = report_of(context)
    assert (report.failure, report.step) == (FailureClass.NON_FINITE, 2)
    assert "held-out" in report.message


def test_a_run_ends_at_the_step_that_it_is_told_with_its_state_and_no_result(tmp_path: Path) -> None:
    context = run_context(tmp_path, tiny_spec(parallelism={"processesPerNode": 1}))
    told = replace(context, until_step=3)
    assert run_gang(told) == [0]
    assert [checkpoint_step(path.name) for path in checkpoint_directories(context.workspace.checkpoints)] == [3, 2]
    assert not context.workspace.adapter.exists()
    assert report_of(context).facts["step"] == "3"
    (started,) = [line for line in read_lines(context.workspace.accounts.read_text()) if line["kind"] == "started"]
    assert (started["world_size"], started["device"]) == (1, "cpu")


def parameters_of(directory: Path) -> dict[str, torch.Tensor]:
    return dict(full_parameters(directory, read_manifest(directory, None)))


def begun_from(undisturbed: RunContext, directory: Path, **changes: dict[str, Any]) -> tuple[RunContext, Path]:
    """A job that begins with the newest checkpoint of the undisturbed run, and where that is."""
    newest = checkpoint_directories(undisturbed.workspace.checkpoints)[0]
    start = f"other/checkpoints/{newest.name}"
    training = {"maxSteps": 1, "startFrom": start, **changes.pop("training", {})}
    context = run_context(directory, tiny_spec(training=training, **changes))
    place = context.claims_root / context.plan.workspace.claim / start
    shutil.copytree(newest, place)
    return context, place


def test_a_run_begins_with_the_parameters_of_another_and_never_returns_to_them(undisturbed: RunContext, tmp_path: Path) -> None:
    """At a rate at which nothing moves; its second attempt, whose own checkpoint counts, does without the other's."""
    slow = {"learningRate": "1e-20", "maxSteps": 2}
    context, place = begun_from(undisturbed, tmp_path, training=slow, checkpoint={"everySteps": 1})
    assert run_gang(context, [Fault("train.step:optimizer_step", call=2)])[0] == -SIGKILL
    (saved,) = checkpoint_directories(context.workspace.checkpoints)
    first, found = parameters_of(place), parameters_of(saved)
    assert found.keys() == first.keys()
    assert all(torch.equal(found[name], first[name]) for name in first)
    assert any(values.any() for name, values in found.items() if "lora_B" in name), "B begins as zeros otherwise"
    assert checkpoint_step(saved.name) == 1
    shutil.rmtree(place)
    assert run_gang(context, []) == [0, 0]


def test_a_run_does_not_begin_with_parameters_of_another_rank(undisturbed: RunContext, tmp_path: Path) -> None:
    context, _ = begun_from(undisturbed, tmp_path, method={"lora": {"r": 2}})
    assert set(run_gang(context, [])) == {EXIT_CODES[FailureClass.CHECKPOINT_INVALID]}
    report = report_of(context)
    assert "spec.training.startFrom" in report.message
    assert "of another model or rank" in report.message

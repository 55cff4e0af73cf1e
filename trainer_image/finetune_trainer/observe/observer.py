"""Passes the training loop's reports to their destinations: metrics, history, goodput records and trackers.

The first rank has a `Reporter`. All other ranks have an `Observer`, which does nothing, so that the loop treats all ranks alike.
Neither makes decisions. Files cover all attempts of the job; metrics and trackers cover only this attempt.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from finetune_job.failures import Outcome
from finetune_job.plan.run_plan import RunPlan
from finetune_job.progress import Progress
from finetune_memory.describe import model_shape, read_model
from finetune_memory.devices import device_of
from finetune_memory.model_shape import UnknownModelError
from finetune_memory.pace import UnknownPaceError, calculated_pace
from finetune_trainer.checkpoint.checkpoints import Checkpoints
from finetune_trainer.checkpoint.evidence import CHECKPOINT_STEP
from finetune_trainer.checkpoint.interval import best_interval
from finetune_trainer.checkpoint.manifest import RunState
from finetune_trainer.context import RunContext
from finetune_trainer.errors import classify
from finetune_trainer.files import write_durably
from finetune_trainer.model.adapters import attach
from finetune_trainer.model.load import build_on_meta
from finetune_trainer.observe.flops import model_cost
from finetune_trainer.observe.goodput import Activity, AttemptStarted
from finetune_trainer.observe.run_files import GoodputRecorder, History, Stopwatch
from finetune_trainer.observe.server import RunMetrics, serving
from finetune_trainer.observe.steps import PaceWindow, StepResult, StepTiming, straggler_ratio
from finetune_trainer.observe.trackers import Trackers
from finetune_trainer.ranks.device_test import DeviceFigures
from finetune_trainer.ranks.gang import Gang
from finetune_trainer.ranks.restarts import read_restarts

_RESUMED = ("epoch", "loss", "learning_rate")
"""Fields of Progress that are stored in the history but not in checkpoints."""


@dataclass(frozen=True)
class ObservedRun:
    """Values that are constant during an attempt."""

    context: RunContext
    plan: RunPlan
    """The plan with the choices that preflight made."""
    reached: DeviceFigures | None
    """Speeds that this rank's device reached in a test before the start; None if it was not tested."""
    gang: Gang
    num_sequences: int
    total_steps: int
    first_step: int
    """Number of steps that earlier attempts have done."""
    is_resumed: bool
    """Whether the run continues from a checkpoint."""
    checkpoints: Checkpoints


@dataclass(frozen=True)
class StepDone:
    """One optimizer step, with the evaluation after it."""

    step: int
    """Number of steps done, including this one."""
    learning_rate: float
    seconds: float
    result: StepResult
    state: RunState
    was_evaluated: bool
    peak_memory_bytes: int | None
    """Largest peak memory of any rank; None if it was not requested after this step."""
    is_saved: bool
    """Whether a checkpoint is taken after this step."""


class Observer:
    """The observer of ranks that do not report; it does nothing."""

    def during(self, _activity: Activity) -> AbstractContextManager[None]:
        """Attribute the time that the body takes to this activity."""
        return nullcontext()

    def evaluated_before_start(self, state: RunState) -> None:
        """Report the base model's held-out loss."""

    def stepped(self, done: StepDone) -> None:
        """Report a step. Call this before the step's checkpoint is taken; otherwise, a run that resumes from it might lack
        the step's line in the history.
        """

    def saved(self) -> None:
        """Report that a checkpoint has been taken."""

    def interval_for_losses(self) -> float | None:
        """Return the best seconds between saves, given the attempts lost so far; None if none was lost, or on other ranks."""
        return None

    def facts(self) -> dict[str, str]:
        """Return facts for the report of a run that has succeeded."""
        return {}


@contextmanager
def observing(
    run: ObservedRun, state: RunState, stopwatch: Stopwatch, port: int, is_stalled: Callable[[], bool]
) -> Iterator[Observer]:
    """Yield the observer for the body, and report to trackers how the body ended. Raises OSError."""
    if not run.gang.is_first:
        yield Observer()
        return
    context, plan = run.context, run.context.plan
    run_metrics = RunMetrics(
        Progress(
            attempt=context.attempt,
            step=run.first_step,
            total_steps=run.total_steps,
            initial_eval_loss=state.initial_eval_loss,
            eval_loss=state.eval_loss,
            best_eval_loss=state.best_eval_loss,
            checkpoint_step=run.checkpoints.complete_step(),
            checkpoint_time=time.time(),
            restarts=read_restarts(context.workspace.restarts(context.attempt)),
        ),
        is_stalled,
    )
    trackers = Trackers(plan.training.trackers)
    with serving(run_metrics, port) as bound_port:
        write_durably(context.workspace.rank_zero, json.dumps({"port": bound_port, "attempt": context.attempt}).encode())
        trackers.start(
            {
                **plan.job.model_dump(),
                "attempt": context.attempt,
                "step": run.first_step,
                "total_steps": run.total_steps,
                "plan": plan.model_dump(mode="json"),
                "directory": str(context.workspace.trackers),
            }
        )
        reporter = Reporter(run, run_metrics, stopwatch, trackers)
        outcome = Outcome.SUCCEEDED.value
        try:
            yield reporter
        except BaseException as error:
            outcome = classify(error)[0].value
            raise
        finally:
            reporter.close()
            trackers.finish(outcome)


class Reporter(Observer):
    """Writes metrics, history and goodput records, and feeds the trackers."""

    def __init__(self, run: ObservedRun, run_metrics: RunMetrics, stopwatch: Stopwatch, trackers: Trackers) -> None:
        self._run, self._run_metrics, self._stopwatch, self._trackers = run, run_metrics, stopwatch, trackers
        workspace = run.context.workspace
        self._history = History(workspace.history, run.first_step if run.is_resumed else None)
        # If the run was stopped during the export, there are no further steps that would set these fields.
        self._run_metrics.update(**{name: self._history.resumed[name] for name in _RESUMED if name in self._history.resumed})
        device = run.gang.device
        product = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        start = AttemptStarted(
            attempt=run.context.attempt,
            time=time.time(),
            step=run.first_step,
            world_size=run.gang.world_size,
            device=product or device.type,
        )
        self._goodput = GoodputRecorder(workspace.accounts, start, stopwatch)
        self._window = PaceWindow()
        self._step = run.first_step
        device_model = device_of(product)
        self._peak, self._cost = device_model.flops if device_model is not None else None, None
        if device_model is not None or run.reached is not None:
            model = build_on_meta(run.context.plan, run.context.base_model)
            trained = attach(model, run.context.plan) if run.context.plan.method.trains_adapter else model
            self._cost = model_cost(trained, model.config)
        self._calculated = calculated_tokens_per_second(run.plan, run.context.base_model, product)
        slowest = run.reached.slowest_share if run.reached is not None else None
        self._run_metrics.update(calculated_tokens_per_second=self._calculated, slowest_device_ratio=slowest)

    def during(self, activity: Activity) -> AbstractContextManager[None]:
        return self._stopwatch.during(activity)

    def evaluated_before_start(self, state: RunState) -> None:
        self._history.append(step=0, attempt=self._run.context.attempt, eval_loss=state.initial_eval_loss)
        if state.initial_eval_loss is not None:
            self._trackers.log(0, {"eval_loss": state.initial_eval_loss})
        self._run_metrics.update(initial_eval_loss=state.initial_eval_loss, eval_loss=state.eval_loss)

    def stepped(self, done: StepDone) -> None:
        run, result, world_size = self._run, done.result, self._run.gang.world_size
        self._step = done.step
        self._see_checkpoints()
        self._stopwatch.move(result.data_seconds, Activity.STEPS, Activity.DATA_WAIT)
        flops = self._cost.step_flops(result.tokens, result.squared_document_lengths) if self._cost else None
        pace = self._window.add(StepTiming(done.seconds, result.data_seconds, result.tokens, flops))
        values: dict[str, Any] = {
            "step": done.step,
            "epoch": done.step * run.plan.training.global_batch_size / run.num_sequences,
            "loss": result.loss,
            "learning_rate": done.learning_rate,
            "gradient_norm": result.gradient_norm,
            "straggler_ratio": straggler_ratio(result.compute_seconds),
        }
        if done.was_evaluated:
            values |= {"eval_loss": done.state.eval_loss, "best_eval_loss": done.state.best_eval_loss}
        if done.peak_memory_bytes is not None:
            values["peak_memory_bytes"] = done.peak_memory_bytes
        line = {
            **values,
            "attempt": run.context.attempt,
            "loss_scale": result.loss_scale if done.state.loss_scale else None,
            "tokens": result.tokens,
            "supervised_tokens": result.supervised_tokens,
            "seconds": done.seconds,
            "data_seconds": result.data_seconds,
            "tokens_per_second": result.tokens / done.seconds,
            "calculated_tokens_per_second": self._calculated,
            "mfu": self._share(flops / done.seconds if flops is not None else None, self._peak),
        }
        self._history.append(**line, **{CHECKPOINT_STEP: run.checkpoints.complete_step()})
        self._trackers.log(done.step, {name: value for name, value in line.items() if value is not None and name != "step"})
        self._goodput.record(done.step, always=done.is_saved)
        totals, goodput_totals = self._run_metrics.totals, self._goodput.totals()
        self._run_metrics.update(
            replace(
                totals,
                tokens=totals.tokens + result.tokens,
                supervised_tokens=totals.supervised_tokens + result.supervised_tokens,
                durations=totals.durations.plus(done.seconds),
                goodput_totals=goodput_totals,
            ),
            **values,
            tokens_per_second=pace.tokens_per_second,
            tokens_per_second_per_device=pace.tokens_per_second / world_size,
            mfu=self._share(pace.flops_per_second, self._peak),
            reached_flops_ratio=self._share(pace.flops_per_second, self._run.reached.flops if self._run.reached else None),
            step_seconds_median=pace.seconds_median,
            step_seconds_p95=pace.seconds_p95,
            checkpoint_interval_seconds=self._checkpoint_interval(pace.seconds_median),
            data_wait_ratio=pace.data_wait_ratio,
            goodput=goodput_totals.goodput,
            seconds_left=pace.seconds_mean * (run.total_steps - done.step),
        )

    def saved(self) -> None:
        self._goodput.saved()
        self._see_checkpoints()

    def interval_for_losses(self) -> float | None:
        losses = self._goodput.losses()
        # Until a save has been measured, it is assumed to take as long as a step.
        save_seconds = losses.save_seconds / losses.num_saves if losses.num_saves else self._window.seconds_mean
        if not losses.count or save_seconds is None:
            return None
        return best_interval(save_seconds, losses.seconds / losses.count)

    def facts(self) -> dict[str, str]:
        goodput_totals = self._goodput.totals()
        self._run_metrics.update(replace(self._run_metrics.totals, goodput_totals=goodput_totals), goodput=goodput_totals.goodput)
        badput = {f"badput.{cause}": f"{seconds:.3f}" for cause, seconds in goodput_totals.badput_seconds.items()}
        totals = {
            "tokens": str(self._history.tokens),
            "seconds": f"{goodput_totals.total_seconds:.3f}",
            "productive_seconds": f"{goodput_totals.productive_seconds:.3f}",
        }
        return {**self._run_metrics.progress.facts(), **totals, **badput}

    def close(self) -> None:
        """Write the last record and close the files."""
        self._goodput.close(self._step)
        self._history.close()

    def _see_checkpoints(self) -> None:
        """Update the checkpoint metrics. An asynchronous checkpoint is complete only some steps after it was taken."""
        checkpoints, totals = self._run.checkpoints, self._run_metrics.totals
        complete = checkpoints.complete_step()
        is_new = complete != self._run_metrics.progress.checkpoint_step
        totals = replace(totals, checkpoints=totals.checkpoints + is_new, failed_saves=checkpoints.failed_saves)
        moment = {"checkpoint_time": time.time()} if is_new else {}
        self._run_metrics.update(totals, checkpoint_step=complete, **moment)

    def _checkpoint_interval(self, step_seconds: float) -> float | None:
        plan = self._run.context.plan.checkpoint
        intervals = [plan.every_steps * step_seconds, plan.every_seconds or 0]
        if plan.adaptive and (for_losses := self.interval_for_losses()) is not None:
            intervals.append(max(for_losses, step_seconds))
        return min((seconds for seconds in intervals if seconds > 0), default=None)

    def _share(self, flops_per_second: float | None, device_flops: float | None) -> float | None:
        """Return this speed as a share of the combined speed of all devices. device_flops: the speed of one device."""
        if flops_per_second is None or device_flops is None:
            return None
        return flops_per_second / (device_flops * self._run.gang.world_size)


def calculated_tokens_per_second(plan: RunPlan, base_model: Path, product: str) -> float | None:
    """Calculate the tokens per second of all ranks on this kind of device; None if the planner does not know device or model."""
    try:
        files = read_model(base_model)
        return calculated_pace(plan, model_shape(plan, files), files.stored, product).tokens_per_second
    except (UnknownModelError, UnknownPaceError):
        return None


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this rank so far: of its GPU, or resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux reports this value in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

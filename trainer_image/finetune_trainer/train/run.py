"""The training run of one rank: build, resume, loop, export.

Pure functions (`policy`) decide what to do; the loop does it together with the other ranks, and informs the observer.
Decisions depend only on the plan, the step, and `RunState`, so a resumed run decides like an uninterrupted one.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from types import FrameType

import torch

from finetune_job.api.training import GradientReduction
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.checkpoint.checkpoints import Checkpoints
from finetune_trainer.checkpoint.load import load_start
from finetune_trainer.checkpoint.manifest import RunState
from finetune_trainer.checkpoint.start import start_directory
from finetune_trainer.checkpoint.state import optimizer_entry
from finetune_trainer.context import RunContext
from finetune_trainer.data.batches import PreparedData, PreparedSplit
from finetune_trainer.data.steps import total_steps
from finetune_trainer.errors import DataError, InvariantError, NonFiniteError, PreemptedError
from finetune_trainer.inspection.report import with_choices_of_preflight
from finetune_trainer.model.first_values import ensure_first_values
from finetune_trainer.model.invariants import has_learnt
from finetune_trainer.model.sharded import TrainedModel, build
from finetune_trainer.objective.next_token import NextToken
from finetune_trainer.observe.goodput import Activity
from finetune_trainer.observe.observer import ObservedRun, Observer, StepDone, observing, peak_memory_bytes
from finetune_trainer.observe.run_files import Stopwatch, process_age_seconds
from finetune_trainer.ranks.device_test import DeviceFigures
from finetune_trainer.ranks.gang import Gang
from finetune_trainer.ranks.stalls import stall_timeouts
from finetune_trainer.ranks.watchdog import STEP, Heartbeat
from finetune_trainer.train import policy
from finetune_trainer.train import step as one_step
from finetune_trainer.train.export import export
from finetune_trainer.train.optimizers import build_optimizer
from finetune_trainer.train.policy import learning_rate
from finetune_trainer.train.step import held_out_loss
from finetune_trainer.train.virtual_ranks import VirtualRanks

log = logging.getLogger(__name__)


def train(  # noqa: PLR0917 - one place calls it
    context: RunContext,
    gang: Gang,
    stop: StopRequest,
    observe_port: int,
    heartbeat: Heartbeat,
    reached: DeviceFigures | None = None,
) -> dict[str, str]:
    """Train to the last step, from the newest valid checkpoint if there is one. Returns facts for rank 0's report.

    reached: speeds of this rank's device in the test before the start; None: it was not tested. Raises PreemptedError after a
    stop request, once the state is saved, or any other TrainerError.
    """
    stopwatch = Stopwatch(process_age_seconds())
    loop = _Loop(context, gang, stop, heartbeat)
    run = ObservedRun(
        context=context,
        plan=loop.plan,
        reached=reached,
        gang=gang,
        num_sequences=loop.data.train.num_sequences,
        total_steps=loop.total,
        first_step=loop.step,
        is_resumed=loop.is_resumed,
        checkpoints=loop.checkpoints,
    )
    limits = stall_timeouts(context.plan.training.step_timeout_seconds)

    def is_stalled() -> bool:
        beat = heartbeat.latest
        return time.monotonic() - beat.at > limits.allowance(is_long=beat.is_long)

    with observing(run, loop.state, stopwatch, observe_port, is_stalled) as observer:
        loop.run(observer)
        return loop.finish(observer)


class _Loop:
    def __init__(self, context: RunContext, gang: Gang, stop: StopRequest, heartbeat: Heartbeat) -> None:
        self.context, self.gang, self.stop, self.heartbeat = context, gang, stop, heartbeat
        self.plan = context.plan
        # All ranks use the choices that the first rank reads. With different choices they could wait for each other forever.
        chosen = with_choices_of_preflight(self.plan, context.workspace.model_report) if gang.is_first else self.plan
        self.plan = RunPlan.model_validate_json(gang.from_first(chosen.model_dump_json(), str))
        training = self.plan.training
        self.data = PreparedData.open(context.workspace.prepared, policy.least_row_length(self.plan))
        if self.data.train.num_sequences == 0:
            raise DataError("spec.data.source: no training sequence was prepared", "give at least one record")
        self.total = total_steps(training.epochs, training.max_steps, self.data.train.num_sequences, training.global_batch_size)
        self.objective = NextToken()
        first_values = self._first_values()
        self.model: TrainedModel = build(self.plan, context.base_model, gang, self.objective, context.workspace.first_values)
        is_ordered = training.reduction is GradientReduction.ORDERED
        virtual = VirtualRanks(self.plan.parallelism.world_size, gang) if is_ordered else None
        if is_ordered and gang.device.type == "cpu":
            # With several threads, a product is summed in that many parts, so its bits would depend on the number of threads.
            torch.set_num_threads(1)
        self.inputs = one_step.StepInputs(
            model=self.model.module,
            objective=self.objective,
            batches=one_step.StepBatches(self.data.train, training, gang, virtual),
            training=training,
            gang=gang,
            autocast=self.model.autocast,
            reduction=self.model.reduction,
        )
        self.optimizer = build_optimizer(self.model.pieces, self.plan)
        self.checkpoints = Checkpoints(
            context,
            gang,
            self.data.data_hash,
            self.model.pieces,
            self.optimizer,
            first_values=first_values,
            is_replicated=is_ordered,
        )
        manifest = self.checkpoints.resume()
        self.is_resumed = manifest is not None
        self.step, self.state = (manifest.step, manifest.state) if manifest is not None else (0, RunState())
        if self.is_resumed:
            log.info("resuming after step %d of %d", self.step, self.total)
        else:
            log.info("starting at step 0 of %d: the workspace holds no checkpoint of this run", self.total)
            start = start_directory(context)
            if start is not None:
                load_start(start, gang, self.model.pieces, self.checkpoints.origin)
                log.info("training starts with the parameters of checkpoint %s", start)

    def _first_values(self) -> str | None:
        """Return the digest of the first values if adapters start from the base's weights. Preflight normally computes them."""
        lora, path = self.plan.method.lora, self.context.workspace.first_values
        if lora is None or not lora.starts_from_base:
            return None
        digest: str = self.gang.from_first(
            ensure_first_values(self.plan, self.context.base_model, path, start_directory(self.context))
            if self.gang.is_first
            else "",
            str,
        )
        return digest

    @property
    def has_ended(self) -> bool:
        until = self.context.until_step
        last = self.total if until is None else min(until, self.total)
        return self.step >= last or policy.is_stopped_early(self.state, self.plan.evaluation)

    def run(self, observer: Observer) -> None:
        """Do all steps that are left."""
        if self.data.validation is not None and self.state.initial_eval_loss is None:
            self._evaluate(observer, self.data.validation)
            observer.evaluated_before_start(self.state)
        while not self.has_ended:
            self._step(observer)

    def _step(self, observer: Observer) -> None:
        evaluation = self.plan.evaluation
        rate = learning_rate(self.step, self.total, self.plan.training)
        scale = (self.state.loss_scale or policy.FIRST_LOSS_SCALE) if self.model.scales_loss else None
        started = time.monotonic()
        with observer.during(Activity.STEPS):
            result = one_step.optimizer_step(
                self.inputs,
                self.optimizer,
                step=self.step,
                learning_rate=rate,
                stop_requested=self.stop.requested,
                loss_scale=scale.factor if scale else policy.UNSCALED,
            )
        if scale:
            self.state = self.state.model_copy(update={"loss_scale": policy.next_loss_scale(scale, result.loss_scale)})
        seconds = time.monotonic() - started
        self.step += 1
        self.heartbeat.beat(STEP, self.step)
        if self.step == 1:
            self._check_first_step(result.gradient_norm)
        is_evaluated = is_best = False
        if self.data.validation is not None and policy.is_evaluation_due(self.step, self.total, evaluation):
            is_evaluated, is_best = True, self._evaluate(observer, self.data.validation)
        # A new best model is saved at once, since its weights are soon overwritten.
        is_kept = is_best and evaluation.load_best_model_at_end
        # `due` is called after every step, because all ranks must call it.
        is_due = self.checkpoints.due(self.step, observer.interval_for_losses())
        is_saved = is_due or is_kept or result.stop or self.has_ended
        observer.stepped(
            StepDone(
                step=self.step,
                learning_rate=rate,
                seconds=seconds,
                result=result,
                state=self.state,
                was_evaluated=is_evaluated,
                peak_memory_bytes=self._peak_memory() if is_saved or is_evaluated or self.step == 1 else None,
                is_saved=is_saved,
            )
        )
        if is_saved:
            self._save(observer, is_best=is_kept, is_last=result.stop or self.has_ended)
        if result.stop and not self.has_ended:
            raise PreemptedError(f"stopped on request after step {self.step} of {self.total}; the state is saved", step=self.step)

    def _evaluate(self, observer: Observer, held_out: PreparedSplit) -> bool:
        """Evaluate the model; returns whether it is the best so far."""
        self.heartbeat.begin("evaluation", self.step)
        with observer.during(Activity.EVALUATION):
            loss = held_out_loss(
                self.model.module,
                self.objective,
                held_out,
                self.plan.training.micro_batch_size,
                gang=self.gang,
                autocast=self.model.autocast,
                after_batch=lambda: self.heartbeat.beat("evaluation batch", self.step),
            )
        self.heartbeat.beat("evaluation", self.step)
        if not math.isfinite(loss):
            raise NonFiniteError(
                f"the loss on the held-out records is {loss} after step {self.step}", one_step.NON_FINITE_HINT, step=self.step
            )
        self.state, is_best = policy.after_evaluation(self.state, self.step, loss, self.plan.evaluation)
        return is_best

    def _save(self, observer: Observer, *, is_best: bool, is_last: bool) -> None:
        self.heartbeat.begin("checkpoint", self.step)
        with observer.during(Activity.CHECKPOINT):
            self.checkpoints.save(self.step, self.state, is_best=is_best, is_last=is_last)
        self.heartbeat.beat("checkpoint", self.step)
        observer.saved()

    def _check_first_step(self, gradient_norm: float) -> None:
        optimizer_entry(self.optimizer)
        if self.plan.method.lora is None or gradient_norm == 0:
            return
        if not any(self.gang.gather(has_learnt((piece.name, piece.parameter_values()) for piece in self.model.pieces), bool)):
            raise InvariantError("after the first step every adapter is still zero, so none is trained", step=1)

    def _peak_memory(self) -> int:
        return max(self.gang.gather(peak_memory_bytes(self.gang.device), int))

    def finish(self, observer: Observer) -> dict[str, str]:
        """Export the result. Returns facts for the report on rank 0, and nothing on other ranks."""
        if self.context.until_step is not None:
            # Only the state after this step was requested, and it has been saved.
            return observer.facts()
        with observer.during(Activity.CHECKPOINT):
            checkpoint = self.checkpoints.finished()
        if checkpoint is None or (checkpoint[1].step != self.step and not self.plan.evaluation.load_best_model_at_end):
            raise InvariantError(f"training ended without a valid checkpoint of step {self.step}")
        log.info("exporting the checkpoint of step %d", checkpoint[1].step)
        facts: dict[str, str] = {}
        self.heartbeat.begin("export", self.step)
        with observer.during(Activity.EXPORT):
            if self.gang.is_first:
                facts = {
                    "adapter_sha256": export(self.context, *checkpoint, self.model.fixed),
                    "exported_step": str(checkpoint[1].step),
                }
            self.gang.barrier()
        if self.gang.is_first and self.step < self.total:
            facts["stopped_early_at"] = str(self.step)
        return facts | observer.facts()


class StopRequest:
    """A request by SIGTERM to stop. Ranks agree on it when they sum the loss, so none stops in the middle of a collective."""

    def __init__(self) -> None:
        self.requested = False

    def install(self) -> None:
        """Handle SIGTERM. Call this in the main thread."""
        signal.signal(signal.SIGTERM, self._on_signal)

    def leave(self) -> None:
        """Let SIGTERM kill this process again; if SIGTERM has already arrived, kill it now.

        Otherwise a rank that has succeeded and torch's agent, which was asked to stop, would wait for each other until the
        agent's shutdown timeout.
        """
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.requested:
            os.kill(os.getpid(), signal.SIGTERM)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True

"""The training run of one rank: build, resume, loop, export."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass

from finetune_job.progress import Progress
from finetune_trainer.checkpoint.load import load, newest_valid
from finetune_trainer.checkpoint.manifest import RunState
from finetune_trainer.checkpoint.save import save
from finetune_trainer.checkpoint.state import PARAMETER, optimizer_step
from finetune_trainer.context import RunContext
from finetune_trainer.data.batches import PreparedData, PreparedSplit
from finetune_trainer.errors import DataError, InvariantError, PreemptedError
from finetune_trainer.files import write_durably
from finetune_trainer.gang import Gang
from finetune_trainer.model.invariants import has_learnt
from finetune_trainer.model.sharded import TrainedModel, build
from finetune_trainer.serve import ProgressBoard, serve
from finetune_trainer.train import step as one_step
from finetune_trainer.train.evaluate import held_out_loss
from finetune_trainer.train.export import export
from finetune_trainer.train.history import History
from finetune_trainer.train.optimizers import adamw
from finetune_trainer.train.schedule import learning_rate, total_steps
from finetune_trainer.train.stop import StopRequest

log = logging.getLogger(__name__)
OBSERVE_FILE = "observe.json"
"""On the workspace: the port on which rank 0 answers."""


@dataclass
class _Losses:
    initial: float | None = None
    latest: float | None = None


def train(context: RunContext, gang: Gang, stop: StopRequest, observe_port: int) -> dict[str, str]:
    """Train to the last step, from the newest valid checkpoint where there is one; rank 0's facts for the report.

    Raises PreemptedError after a stop request, with the state saved, and any TrainerError.
    """
    return _Run(context, gang, stop).run(observe_port)


class _Run:
    def __init__(self, context: RunContext, gang: Gang, stop: StopRequest) -> None:
        self.context, self.gang, self.stop = context, gang, stop
        self.plan = context.plan
        self.data = PreparedData.open(context.workspace.prepared)
        training = self.plan.training
        if self.data.train.num_sequences == 0:
            raise DataError("spec.data.source: no training sequence was prepared", "give at least one record")
        self.total = total_steps(training.epochs, training.max_steps, self.data.train.num_sequences, training.global_batch_size)
        self.model: TrainedModel = build(self.plan, context.base_model, gang)
        self.optimizer = adamw(self.model.module, training)
        self.losses = _Losses()
        self.checkpoint = newest_valid(context.workspace.checkpoints, gang, context.plan_sha256, self.data.data_hash)
        self.step = 0
        if self.checkpoint is not None:
            directory, manifest = self.checkpoint
            load(directory, manifest, self.model.pieces, self.optimizer)
            self.step = manifest.step
            self.losses = _Losses(manifest.state.initial_eval_loss, manifest.state.eval_loss)
            log.info("resuming after step %d of %d", self.step, self.total)

    def run(self, observe_port: int) -> dict[str, str]:
        board = history = server = None
        if self.gang.is_first:
            history = History(self.context.workspace.history, self.step if self.checkpoint else None)
            board = ProgressBoard(
                Progress(
                    attempt=self.context.attempt,
                    step=self.step,
                    total_steps=self.total,
                    initial_eval_loss=self.losses.initial,
                    eval_loss=self.losses.latest,
                    checkpoint_step=self.step if self.checkpoint else None,
                )
            )
            server = serve(board, observe_port)
            address = {"port": server.server_address[1], "attempt": self.context.attempt}
            write_durably(self.context.workspace.root / OBSERVE_FILE, json.dumps(address).encode())
        try:
            self._loop(board, history)
            return self._finish(board)
        finally:
            if server is not None:
                server.shutdown()
                server.server_close()

    def _loop(self, board: ProgressBoard | None, history: History | None) -> None:
        held_out = self.data.validation
        if held_out is not None and self.losses.initial is None:
            self.losses.initial = self.losses.latest = self._evaluate(held_out)
            if board and history:
                history.append(step=0, eval_loss=self.losses.initial)
                board.update(initial_eval_loss=self.losses.initial, eval_loss=self.losses.initial)
        training = self.plan.training
        while self.step < self.total:
            started = time.monotonic()
            rate = learning_rate(self.step, self.total, training.learning_rate, training.scheduler, training.warmup_ratio)
            result = one_step.optimizer_step(
                self.model.module,
                self.optimizer,
                self.data.train,
                training,
                step=self.step,
                learning_rate=rate,
                gang=self.gang,
                autocast=self.model.autocast,
                stop_requested=self.stop.requested,
            )
            seconds = time.monotonic() - started
            self.step += 1
            if self.step == 1:
                self._check_first_step(result.gradient_norm)
            is_last = self.step == self.total
            every = self.plan.evaluation.every_steps
            evaluation = {}
            if held_out is not None and (is_last or (every is not None and self.step % every == 0)):
                self.losses.latest = self._evaluate(held_out)
                evaluation = {"eval_loss": self.losses.latest}
            if board and history:
                line = {
                    "step": self.step,
                    "epoch": self.step * training.global_batch_size / self.data.train.num_sequences,
                    "loss": result.loss,
                    "learning_rate": rate,
                    "tokens_per_second": result.tokens / seconds,
                    **evaluation,
                }
                # Before the checkpoint: a run resumed from it does not do this step again, so nobody else would write the line.
                history.append(
                    **line, gradient_norm=result.gradient_norm, supervised_tokens=result.supervised_tokens, seconds=seconds
                )
                board.update(**line)
            if is_last or result.stop or self.step % self.plan.checkpoint.every_steps == 0:
                self._save()
                if board:
                    board.update(checkpoint_step=self.step)
            if result.stop and not is_last:
                raise PreemptedError(
                    f"stopped on request after step {self.step} of {self.total}; the state is saved", step=self.step
                )

    def _evaluate(self, data: PreparedSplit) -> float:
        return held_out_loss(self.model.module, data, self.plan.training.micro_batch_size, self.gang, self.model.autocast)

    def _check_first_step(self, gradient_norm: float) -> None:
        optimizer_step(self.optimizer)
        if self.plan.method.lora is None or gradient_norm == 0:
            return
        learnt = has_learnt((piece.name, piece.values(PARAMETER, self.optimizer)) for piece in self.model.pieces)
        if not any(self.gang.gather(learnt)):
            raise InvariantError("after the first step every lora_B is still zero, so no adapter is trained", step=1)

    def _save(self) -> None:
        self.checkpoint = save(
            self.context.workspace.checkpoints,
            step=self.step,
            found=self.model.pieces,
            optimizer=self.optimizer,
            gang=self.gang,
            plan_sha256=self.context.plan_sha256,
            data_hash=self.data.data_hash,
            state=RunState(initial_eval_loss=self.losses.initial, eval_loss=self.losses.latest),
            keep=self.plan.checkpoint.keep,
        )

    def _finish(self, board: ProgressBoard | None) -> dict[str, str]:
        if self.checkpoint is None or self.checkpoint[1].step != self.total:
            raise InvariantError(f"training ended without a valid checkpoint of step {self.total}")
        facts: dict[str, str] = {}
        if board is not None:
            facts = {"adapter_sha256": export(self.context, *self.checkpoint), **board.progress.facts()}
        self.gang.barrier()
        return facts

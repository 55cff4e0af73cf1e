"""The checkpoints of one run, as the training loop sees them: resume, save, and choose what to export."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch

from finetune_job.layout import checkpoint_name
from finetune_trainer.checkpoint.evidence import Evidence, recorded_progress
from finetune_trainer.checkpoint.load import load, newest_foreign_step, newest_valid, unusable_checkpoints, verified_manifest
from finetune_trainer.checkpoint.manifest import Manifest, RunState
from finetune_trainer.checkpoint.save import PendingSave, Snapshot, begin_save, commit_save
from finetune_trainer.checkpoint.start import origin_of
from finetune_trainer.checkpoint.state import ParameterRange, share
from finetune_trainer.context import RunContext
from finetune_trainer.errors import CheckpointError, SaveError
from finetune_trainer.ranks.gang import Gang

log = logging.getLogger(__name__)
_HINT = (
    "repair the storage or restore the directory; or discard the training: remove the directory, and history.jsonl, "
    "accounts.jsonl and reports next to it, then start again"
)
FAILURES_IN_A_ROW = 2
"""Number of consecutive failed saves that end the run. A single periodic save may fail, since the next may find room again."""


class Checkpoints:
    """The checkpoints of one run. All ranks call each method together.

    A thread writes an asynchronous save from a copy in host memory. The main thread, which runs all collectives, renames the new
    checkpoint into place at the first step boundary after all ranks have written. If killed earlier, the run keeps the old one.
    """

    def __init__(
        self,
        context: RunContext,
        gang: Gang,
        data_hash: str,
        pieces: list[ParameterRange],
        optimizer: torch.optim.Optimizer,
        *,
        first_values: str | None = None,
        is_replicated: bool = False,
    ) -> None:
        """is_replicated: whether every rank holds all parameters whole, so that each rank needs to write only its share."""
        self._gang, self._pieces, self._optimizer = gang, pieces, optimizer
        self._written = share(pieces, gang.rank, gang.world_size) if is_replicated else pieces
        self._plan = context.plan.checkpoint
        self._exports_best = context.plan.evaluation.load_best_model_at_end
        self._workspace, self._root = context.workspace, context.workspace.checkpoints
        self.origin = origin_of(context, data_hash, first_values)
        self._newest: tuple[Path, Manifest] | None = None
        self._best_step: int | None = None
        self._under_way: PendingSave | None = None
        self._reused: Snapshot | None = None
        self._latest_save = time.monotonic()
        self._failed_in_a_row = 0
        self.failed_saves = 0
        """Number of saves that failed in this attempt while training continued."""

    def resume(self) -> Manifest | None:
        """Load the newest valid checkpoint into parameters and optimizer. Returns None if this run has never completed one.

        Raises CheckpointError if this run has completed checkpoints but none can be used, or if loading fails.
        """
        self._newest = newest_valid(self._root, self._gang, self.origin)
        if self._newest is None:
            self._check_never_completed()
            return None
        directory, manifest = self._newest
        self._warn_of_lost_steps(manifest.step)
        load(directory, manifest, self._pieces, self._optimizer)
        self._best_step = manifest.best_step
        return manifest

    def _warn_of_lost_steps(self, step: int) -> None:
        """Warn if steps after `step`, from which the run resumes, were once saved. This never prevents resuming."""
        if not self._gang.is_first:
            return
        try:
            evidence = self._lost_progress(step)
        except OSError as error:
            log.warning("it is unknown whether steps after %d were saved: %s", step, error)
            return
        if evidence is not None:
            log.warning(
                "%s says that the checkpoint of step %d was complete, but it is missing or damaged: the steps after %d are "
                "trained again",
                evidence.path.name,
                evidence.step,
                step,
            )

    def _lost_progress(self, step: int) -> Evidence | None:
        """Return evidence that a step after `step` was saved, or None. Raises OSError."""
        evidence = recorded_progress(self._workspace)
        # Evidence does not name its run. If another run has checkpoints here, only evidence of steps after its newest one counts.
        is_lost = evidence is not None and evidence.step > max(step, newest_foreign_step(self._root, self.origin))
        return evidence if is_lost else None

    def _check_never_completed(self) -> None:
        unusable = unusable_checkpoints(self._root, self._gang, self.origin)
        if unusable:
            raise CheckpointError(
                f"{self._root}: none of this run's checkpoints can be used: {', '.join(unusable)}; the newest: "
                f"{next(iter(unusable.values()))}",
                _HINT,
            )
        # Only rank 0 reads the evidence, so that all ranks make the same decision.
        evidence = self._gang.from_first(self._lost_progress(0) if self._gang.is_first else None, Evidence | None)
        if evidence is not None:
            raise CheckpointError(
                f"{self._root}: {evidence.path.name} says that the checkpoint of step {evidence.step} was complete, but "
                "there is no checkpoint",
                _HINT,
            )

    def due(self, step: int, interval_for_losses: float | None = None) -> bool:
        """Whether the plan requires a checkpoint after this step; the same on all ranks. All ranks call this once per step.

        interval_for_losses: best number of seconds between saves, given the attempts lost so far; used if the plan is adaptive.

        Completes a pending save once all ranks have written. Ranks communicate only while a save is pending, or if the interval
        is in seconds, since rank 0's clock then decides. Raises SaveError.
        """
        if self._under_way is not None:
            (written,) = self._gang.sum([float(self._under_way.is_done)])
            if written == self._gang.world_size:
                self.wait()
        if step % self._plan.every_steps == 0:
            return True
        if self._plan.every_seconds is None and not self._plan.adaptive:
            return False
        limits = [self._plan.every_seconds, interval_for_losses if self._plan.adaptive else None]
        passed = time.monotonic() - self._latest_save
        return self._gang.from_first(any(limit is not None and passed >= limit for limit in limits), bool)

    def save(self, step: int, state: RunState, *, is_best: bool = False, is_last: bool = False) -> None:
        """Save the state after optimizer step `step`.

        is_best: keep the checkpoint until there is a better one. is_last: the process ends afterwards, so wait for the save.

        A failed save is logged and counted. If it is the last save or the second failure in a row, raises SaveError on all
        ranks; older checkpoints are unharmed.
        """
        self.wait()
        self._latest_save = time.monotonic()
        try:
            self._under_way = begin_save(
                self._root,
                step=step,
                ranges=self._written,
                optimizer=self._optimizer,
                gang=self._gang,
                origin=self.origin,
                state=state,
                best_step=step if is_best and self._exports_best else self._best_step,
                reused=self._reused,
                is_copied=self._plan.asynchronous,
            )
        except SaveError as error:
            self._failed(error, is_last=is_last)
            return
        if is_last or not self._plan.asynchronous:
            self._complete(is_last=is_last)

    def wait(self) -> None:
        """Complete the pending save, if there is one. Raises SaveError for the second failure in a row."""
        if self._under_way is not None:
            self._complete(is_last=False)

    def complete_step(self) -> int | None:
        """Step of the newest checkpoint that is known to be complete, or None."""
        return self._newest[1].step if self._newest else None

    def finished(self) -> tuple[Path, Manifest] | None:
        """Wait for a pending save, and return the checkpoint to export: the newest or, if the plan says so, the best.

        Raises CheckpointError if the best one is damaged, and SaveError as `wait` does.
        """
        self.wait()
        best = self._best_step
        if not self._exports_best or self._newest is None or best in (None, self._newest[1].step):
            return self._newest
        directory = self._root / checkpoint_name(best or 0)
        manifest, problems = verified_manifest(directory, self._gang, self.origin)
        if manifest is None:
            raise CheckpointError(
                f"{directory}: the best checkpoint cannot be used: {'; '.join(problems)}",
                "the newest checkpoint is unharmed; start a job without loadBestModelAtEnd, or restore the directory",
            )
        return directory, manifest

    def _complete(self, *, is_last: bool) -> None:
        pending, self._under_way = self._under_way, None
        if pending is None:
            return
        if self._plan.asynchronous:
            # All later saves reuse this host memory, which is pinned if the copy is from a GPU.
            self._reused = pending.snapshot
        try:
            self._newest = commit_save(self._root, pending, self._gang, self._plan.keep)
        except SaveError as error:
            self._failed(error, is_last=is_last)
            return
        self._best_step = self._newest[1].best_step
        self._failed_in_a_row = 0

    def _failed(self, error: SaveError, *, is_last: bool) -> None:
        self.failed_saves += 1
        self._failed_in_a_row += 1
        if is_last or self._failed_in_a_row >= FAILURES_IN_A_ROW:
            raise error
        log.error("%s; training continues and tries again at the next checkpoint", error)

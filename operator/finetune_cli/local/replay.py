"""Runs the plan of a run again in a scratch directory: all of it, or from one kept checkpoint to the next.

The run itself is only read. Its plan stays the same, except for the places of workspace and results, and except that nothing is
fetched, rehearsed or published again.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_cli.local.claims import claim_directories, claims_of, link_claims
from finetune_cli.local.launch import Interruption
from finetune_cli.local.local_run import LocalRun, RunListener
from finetune_cli.local.run_directory import RunDirectory, freeze, locked
from finetune_job.api.base import ClaimPath
from finetune_job.api.training import GradientReduction
from finetune_job.layout import OutputLayout, WorkspaceLayout
from finetune_job.names import Role
from finetune_job.plan.run_plan import RunPlan

SCRATCH_CLAIM = "scratch-of-audit"
"""Name of the claim to which a replay writes. A job with a claim of this name cannot be audited."""


@dataclass(frozen=True)
class Interval:
    """Optimizer steps after `start` up to `end`. The checkpoints of both steps were kept; 0 is the start of training."""

    start: int
    end: int

    def __str__(self) -> str:
        return f"steps {self.start + 1} to {self.end}"


def kept_intervals(steps: Sequence[int]) -> list[Interval]:
    """Return the intervals between checkpoints in order. The steps up to the first one are left out if longer than the rest."""
    intervals = [Interval(start, end) for start, end in pairwise(steps)]
    longest = max((interval.end - interval.start for interval in intervals), default=0)
    return [Interval(0, steps[0]), *intervals] if steps and 0 < steps[0] <= longest else intervals


def draw(intervals: Sequence[Interval], count: int, seed: int) -> list[Interval]:
    """Choose intervals at random from a seed, and return them in their original order."""
    chosen = random.Random(seed).sample(intervals, min(count, len(intervals)))  # noqa: S311 - the seed is printed, to repeat the draw
    return sorted(chosen, key=lambda each: each.end)


def replay_plan(plan: RunPlan) -> RunPlan:
    """Return a plan with the same training, but workspace and results in the scratch directory. Raises LocalError."""
    if any(use.name == SCRATCH_CLAIM for use in claims_of(plan)):
        raise LocalError(f"claim {SCRATCH_CLAIM}: the job names it, and the audit writes to a directory of this name; rename it")
    places = {
        "workspace": ClaimPath(claim=SCRATCH_CLAIM, path="workspace"),
        "output": ClaimPath(claim=SCRATCH_CLAIM, path="output"),
    }
    return plan.model_copy(update={**places, "fetch": None, "publish": None, "rehearses": False})


def check_ranks(plan: RunPlan, ranks: int | None) -> None:
    """Check a number of ranks. Raises LocalError if the bytes would differ, or the plan cannot run on this machine."""
    is_ordered, most = plan.training.reduction is GradientReduction.ORDERED, plan.parallelism.world_size
    if ranks is not None and ranks != most and not is_ordered:
        raise LocalError(
            f"--ranks {ranks}: the run adds up gradients in an order that depends on its {most} ranks, and a different number "
            "gives different bytes; leave --ranks out"
        )
    if ranks is not None and ranks > most:
        raise LocalError(f"--ranks {ranks}: the run has {most}; give at most as many")
    if plan.parallelism.nodes > 1 and not is_ordered:
        raise LocalError(
            f"spec.parallelism.nodes: the run has {plan.parallelism.nodes}, and one machine gives different bytes; set "
            "spec.training.reduction to Ordered in the next job"
        )


def claims_of_run(run: RunDirectory, plan: RunPlan, given: Mapping[str, Path]) -> dict[str, Path]:
    """Return the directory of each claim of a run. `given`: directories of claims that have moved since. Raises LocalError."""
    directories = {}
    for use in claims_of(plan):
        place = given[use.name].absolute() if use.name in given else (run.claims / use.name).resolve()
        if not place.is_dir():
            raise LocalError(
                f"{use.field}: claim {use.name} was the directory {place}, which is not there any more; restore it, or say where "
                f"it is with --claim {use.name}=PATH"
            )
        directories[use.name] = place
    return directories


def _link_or_copy(source: str, target: str) -> None:
    """Hard-link a file, which is never written to, or copy it if the target is on another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


class Replay:
    """A scratch directory in which the plan of a run is run again. As a context manager, it holds the directory's lock."""

    def __init__(self, plan: RunPlan, claims: Mapping[str, Path], scratch: Path) -> None:
        """`claims`: directories of the run's own claims. Raises LocalError."""
        self.plan = replay_plan(plan)
        self._held, self._lock = ExitStack(), -1
        self.place = RunDirectory(scratch)
        self._original = WorkspaceLayout(claims[plan.workspace.claim] / plan.workspace.path)
        self.workspace = WorkspaceLayout(scratch / SCRATCH_CLAIM / self.plan.workspace.path)
        self.output = OutputLayout(scratch / SCRATCH_CLAIM / self.plan.output.path)
        uses = claims_of(self.plan)
        places = claim_directories(uses, scratch, {**claims, SCRATCH_CLAIM: scratch / SCRATCH_CLAIM})
        link_claims(uses, places, self.place.claims)

    def __enter__(self) -> Self:
        self._lock = self._held.enter_context(locked(self.place))
        return self

    def __exit__(self, *exception: object) -> None:
        self._held.close()

    def take_inputs(self, checkpoints: Sequence[str]) -> None:
        """Copy or link what preflight has made, and copy the checkpoints with these directory names. Raises LocalError."""
        original, workspace = self._original, self.workspace
        try:
            workspace.checkpoints.mkdir(parents=True)
            # The prepared data is linked, because it is never written to and is as large as the records.
            workspace.prepared.symlink_to(original.prepared, target_is_directory=True)
            for path in (original.model_report, original.first_values, original.added_tokens):
                if path.is_file():
                    shutil.copyfile(path, workspace.root / path.name)
            if original.base_with_tokens.is_dir():
                # The directory itself is not linked, because files of training must not lie outside their claim.
                shutil.copytree(original.base_with_tokens, workspace.base_with_tokens, copy_function=_link_or_copy)
            for name in checkpoints:
                shutil.copytree(original.checkpoints / name, workspace.checkpoints / name)
        except OSError as error:
            copied = ", ".join(checkpoints) or "the inputs"
            raise LocalError(
                f"{self.place.root} cannot hold a copy of {copied}: {error.strerror or error}; set TMPDIR to a directory "
                "with room, and let nothing else change the run meanwhile",
                ExitCode.FAILED,
            ) from error

    def run(
        self,
        roles: Sequence[Role],
        listener: RunListener,
        interruption: Interruption,
        *,
        ranks: int | None,
        until_step: int | None = None,
    ) -> None:
        """Run these roles until they end. Raises LocalError if one does not succeed."""
        record = freeze(self.place, self.plan)
        local_run = LocalRun(self.place, self.plan, record, self._lock, listener, ranks=ranks, until_step=until_step)
        code = local_run.execute(0, interruption, roles=roles)
        if code is ExitCode.INTERRUPTED:
            raise LocalError("interrupted; nothing was changed", code)
        if code is not ExitCode.DONE:
            last = local_run.last
            reason = "" if last is None else f"{last.role} failed: {last.message}{f'; {last.hint}' if last.hint else ''}"
            raise LocalError(f"{self.plan.job.namespace}/{self.plan.job.name} could not be run again. {reason}", ExitCode.FAILED)

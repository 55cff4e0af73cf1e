"""Run the rehearsal, stage by stage, in a separate process (roles/rehearse.py), which leaves all computing to its children."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from finetune_job.failures import TerminationReport
from finetune_job.names import Role
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.context import RunContext
from finetune_trainer.files import file_sha256
from finetune_trainer.inspection.report import RehearsalReport, Stage, StageResult, Verdict
from finetune_trainer.model.load import load_config, stored_dtype
from finetune_trainer.processes.forked import BoundsExceededError, ChildResult, ResourceBounds, run_children
from finetune_trainer.ranks.reports import read_rank_reports, root_cause
from finetune_trainer.rehearsal import child_tasks
from finetune_trainer.rehearsal.comparison import coarsest_dtype
from finetune_trainer.rehearsal.scaled_model import RehearsalPaths, ScaledModel
from finetune_trainer.rehearsal.scaled_plan import RESUMED_AFTER, float32_plan, method_without_dropout, single_process_plan
from finetune_trainer.rehearsal.verdicts import Inconclusive, StageFailure, failed_finding, failure_of_stage, not_done_finding

log = logging.getLogger(__name__)
StageListener = Callable[[StageResult], None]


def rehearse(
    plan: RunPlan,
    directory: Path,
    root: Path,
    bounds: ResourceBounds,
    *,
    merge: child_tasks.MergeRole,
    on_stage: StageListener = lambda _: None,
) -> RehearsalReport:
    """Try `plan` on a scaled-down copy of the model in `directory`. Faults of the job are reported, not raised.

    `root`: empty directory for all files. `merge`: the merge role. `on_stage`: called with the result of each stage.
    """
    rehearsal = _Rehearsal(plan, directory, RehearsalPaths(root), bounds, merge, on_stage)
    verdict, findings = Verdict.PASSED, []
    try:
        rehearsal.run()
    except StageFailure as problem:
        verdict, findings = Verdict.FAILED, [failed_finding(problem, plan, root)]
    except Inconclusive as reason:
        verdict, findings = Verdict.NOT_DONE, [not_done_finding(str(reason), root)]
    except BoundsExceededError as reason:
        stage = rehearsal.stage
        verdict, findings = Verdict.NOT_DONE, [not_done_finding(f"{reason} (in the stage {stage.value})", root)]
    return RehearsalReport(
        verdict=verdict,
        seconds=round(time.monotonic() - bounds.began, 1),
        peak_memory_bytes=bounds.peak_memory_bytes,
        parameters=rehearsal.parameters,
        changes=tuple(rehearsal.changes),
        stages=tuple(rehearsal.stages),
        findings=tuple(findings),
    )


@dataclass
class _Rehearsal:
    plan: RunPlan
    directory: Path
    paths: RehearsalPaths
    bounds: ResourceBounds
    merge: child_tasks.MergeRole
    on_stage: StageListener
    stage: Stage = Stage.BUILD
    stages: list[StageResult] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    parameters: int = 0

    def run(self) -> None:
        """Run all stages. Raises StageFailure, Inconclusive, BoundsExceededError."""
        with self._during(Stage.BUILD):
            plan, draws_random_numbers = self._build()
        undisturbed = self.paths.run("undisturbed", plan)
        if plan.parallelism.leaves_resharding_open:
            # Preflight has not yet chosen whether ranks free parameters after the forward pass, so both ways are tried: only the
            # resumed run does so. As in a job for which preflight has chosen, the digest remains that of the original plan.
            undisturbed = replace(undisturbed, plan=plan.with_fsdp(reshard_after_forward=False))
            self.changes.append("parallelism.fsdp.reshardAfterForward: false undisturbed, true when resumed; the same bytes")
        with self._during(Stage.TRAIN):
            self._gang(undisturbed)
        with self._during(Stage.RESUME):
            self._resume(plan, undisturbed)
        self._conclude(plan, undisturbed, draws_random_numbers=draws_random_numbers)

    def _build(self) -> tuple[RunPlan, bool]:
        try:
            # Import the model's code here, so that no child has to.
            config = load_config(self.plan, self.directory)
            if type(config) in AutoModelForCausalLM._model_mapping:  # noqa: SLF001 - there is no public way to import it without building it
                AutoModelForCausalLM._model_mapping[type(config)]  # noqa: SLF001
        except Exception as error:
            raise Inconclusive(f"{type(error).__name__}: {error}") from error
        task = partial(child_tasks.make_model_in_child, self.plan, self.directory, self.paths)
        ended = self._children({"model": task})["model"]
        if ended.code != 0:
            raise Inconclusive(ended.message or ended.problem)
        try:
            made = ScaledModel.model_validate_json(ended.value)
        except ValueError as error:
            raise Inconclusive("the process that makes the scaled-down model did not answer with a plan") from error
        self.changes, self.parameters = list(made.changes), made.parameters
        return made.plan, made.draws_random_numbers

    def _resume(self, plan: RunPlan, undisturbed: RunContext) -> None:
        resumed = self.paths.run("resumed", plan)
        cut = partial(child_tasks.copy_up_to, RESUMED_AFTER, undisturbed.workspace, resumed.workspace)
        _raise_for(Stage.RESUME, self._children({"copy": cut})["copy"])
        self._gang(replace(resumed, attempt=1))
        expected, actual = (_digests(context.workspace.adapter) for context in (undisturbed, resumed))
        if actual != expected:
            names = sorted(name for name in {*actual, *expected} if actual.get(name) != expected.get(name))
            raise StageFailure(
                Stage.RESUME,
                f"resumed from a checkpoint, the run does not end with the undisturbed run's bytes: {', '.join(names)} differ",
            )

    def _conclude(self, plan: RunPlan, undisturbed: RunContext, *, draws_random_numbers: bool) -> None:
        """Run the last tasks at the same time, each in one process."""
        work: dict[Stage, Callable[[], Any]] = {Stage.SAVE: partial(child_tasks.check_saved, undisturbed)}
        started = time.monotonic()
        if plan.parallelism.world_size > 1:
            work[Stage.COMPARE] = self._compared(plan, undisturbed, draws_random_numbers=draws_random_numbers)
        before = {Stage.COMPARE: time.monotonic() - started}
        work[Stage.MERGE] = partial(child_tasks.merge, self.merge, undisturbed)
        self.stage = Stage.MERGE
        ended = self._children({stage.value: task for stage, task in work.items()})
        for stage in work:
            self._stage_ended(stage, before.get(stage, 0.0) + ended[stage.value].seconds, ended[stage.value].problem)
        for stage in work:
            _raise_for(stage, ended[stage.value])

    def _compared(self, plan: RunPlan, undisturbed: RunContext, *, draws_random_numbers: bool) -> Callable[[], Any]:
        """Do the comparison's runs on ranks, and return a task that does its runs in one process and compares both."""
        sharded = undisturbed
        if draws_random_numbers:
            plan = plan.model_copy(update={"method": method_without_dropout(plan.method)})
            sharded = self.paths.run("quiet", plan, quiet=True)
        with self._during(Stage.COMPARE, is_whole=False):
            if sharded is not undisturbed:
                self._gang(sharded)
            exactly = self._exactly(plan)
        return partial(
            child_tasks.compare,
            child_tasks.Pair(sharded, self.paths.run("alone", single_process_plan(plan), quiet=True)),
            exactly,
        )

    def _exactly(self, plan: RunPlan) -> child_tasks.Pair | None:
        """Train the same job in float32 on ranks; None if the job itself computes in float32, or if that run fails."""
        if coarsest_dtype(plan, stored_dtype(self.paths.model)).itemsize >= torch.float32.itemsize:
            return None
        plan = float32_plan(plan)
        sharded = self.paths.run("exact", plan, quiet=True)
        try:
            self._gang(sharded)
        except StageFailure as problem:
            self.changes.append(f"gradients are compared in the job's own precision alone: in float32 {problem}")
            return None
        return child_tasks.Pair(sharded, self.paths.run("exact-alone", single_process_plan(plan), quiet=True))

    def _gang(self, context: RunContext) -> None:
        """Train on all ranks."""
        world_size = context.plan.parallelism.world_size
        name = context.claims_root.name
        store = f"file://{self.paths.root / name}.store"
        ended = self._children(
            {
                f"{name}-rank-{rank}": partial(child_tasks.run_rank, context, rank, world_size, store)
                for rank in range(world_size)
            },
            together=True,
        )
        cause = root_cause(read_rank_reports(context.workspace.reports(Role.TRAIN.value, context.attempt)))
        if cause is not None:
            self._see_whether_ranks_can_meet(world_size)
            raise failure_of_stage(self.stage, _message_with_type(cause), cause.hint, cause.failure)
        for result in ended.values():
            _raise_for(self.stage, result)

    def _see_whether_ranks_can_meet(self, world_size: int) -> None:
        """Raise Inconclusive if processes on this machine cannot reach each other: failures then say nothing about the job."""
        if world_size == 1:
            return
        store = f"file://{self.paths.root / 'meeting.store'}"
        meetings: dict[str, Callable[[], Any]] = {
            f"meeting-{rank}": partial(child_tasks.meet, rank, world_size, store) for rank in range(world_size)
        }
        for ended in self._children(meetings, together=True).values():
            if ended.error:
                raise Inconclusive(
                    f"processes of this machine cannot reach each other, as two ranks would have to: {ended.error}"
                )

    def _children(self, work: dict[str, Callable[[], Any]], *, together: bool = False) -> dict[str, ChildResult]:
        return run_children(work, self.paths.root, self.bounds, together=together)

    @contextmanager
    def _during(self, stage: Stage, *, is_whole: bool = True) -> Iterator[None]:
        self.stage = stage
        started = time.monotonic()
        try:
            yield
        except (StageFailure, Inconclusive, BoundsExceededError) as error:
            self._stage_ended(stage, time.monotonic() - started, str(error))
            raise
        if is_whole:
            self._stage_ended(stage, time.monotonic() - started)

    def _stage_ended(self, stage: Stage, seconds: float, problem: str = "") -> None:
        result = StageResult(stage=stage, seconds=round(seconds, 1), problem=problem.replace(str(self.paths.root), "."))
        self.stages.append(result)
        self.on_stage(result)


def _raise_for(stage: Stage, ended: ChildResult) -> None:
    if ended.code == -signal.SIGKILL:
        raise Inconclusive(f"{ended.problem}. Only a lack of memory kills a process like this")
    if ended.code != 0:
        raise failure_of_stage(stage, ended.message or ended.problem, ended.hint, ended.failure)


def _message_with_type(cause: TerminationReport) -> str:
    """Return the message, with the exception's type before it unless the trainer defines that type."""
    last = cause.exception.strip().splitlines()[-1:] or [""]
    kind = last[0].partition(":")[0]
    is_ours = kind.startswith("finetune_trainer.")
    return cause.message if is_ours or not kind.isidentifier() else f"{kind}: {cause.message}"


def _digests(directory: Path) -> dict[str, str]:
    """Return the digest of each file below the directory, by relative path."""
    files = sorted(path for path in directory.rglob("*") if not path.is_dir())
    return {str(path.relative_to(directory)): file_sha256(path) for path in files}

"""The rehearsal, stage by stage. Called in a process of its own (roles/rehearse.py), which never computes itself."""

from __future__ import annotations

import dataclasses
import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from finetune_job.failures import FailureClass, TerminationReport
from finetune_job.names import Role
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.context import RunContext
from finetune_trainer.files import file_sha256
from finetune_trainer.inspection.rehearsal_report import RehearsalReport, Stage, StageResult, Verdict
from finetune_trainer.model.load import load_config, stored_dtype
from finetune_trainer.processes.forked import Bounds, BoundsExceededError, Ended, run_children
from finetune_trainer.ranks.reports import read_rank_reports, root_cause
from finetune_trainer.rehearsal import bodies
from finetune_trainer.rehearsal.comparison import computes_in
from finetune_trainer.rehearsal.places import Places
from finetune_trainer.rehearsal.twin_plan import KILLED_IN_STEP, alone, exact, quiet_method
from finetune_trainer.rehearsal.verdicts import CannotTell, Problem, failed, not_done, problem_of

log = logging.getLogger(__name__)
Told = Callable[[StageResult], None]


def rehearse(
    plan: RunPlan, directory: Path, root: Path, bounds: Bounds, *, merge: bodies.MergeRole, told: Told = lambda _: None
) -> RehearsalReport:
    """Try `plan` on a twin of the model in `directory`, with files under `root`, which is empty. Never raises for what it finds.

    `merge`: the merge role. `told`: of each stage when it has ended.
    """
    rehearsal = _Rehearsal(plan, directory, Places(root), bounds, merge=merge, told=told)
    started = time.monotonic()
    verdict, findings = Verdict.PASSED, []
    try:
        rehearsal.run()
    except Problem as problem:
        verdict, findings = Verdict.FAILED, [failed(problem, plan, root)]
    except CannotTell as reason:
        verdict, findings = Verdict.NOT_DONE, [not_done(str(reason), root)]
    except BoundsExceededError as reason:
        stage = rehearsal.stage
        verdict, findings = Verdict.NOT_DONE, [not_done(f"{reason} (in the stage {stage.value})", root)]
    return RehearsalReport(
        verdict=verdict,
        seconds=round(time.monotonic() - started, 1),
        peak_memory_bytes=bounds.peak_memory_bytes,
        parameters=rehearsal.parameters,
        changes=tuple(rehearsal.changes),
        stages=tuple(rehearsal.stages),
        findings=tuple(findings),
    )


class _Rehearsal:
    def __init__(
        self, plan: RunPlan, directory: Path, places: Places, bounds: Bounds, *, merge: bodies.MergeRole, told: Told
    ) -> None:
        self.plan, self.directory, self.places, self.bounds = plan, directory, places, bounds
        self.merge, self.told = merge, told
        self.stage = Stage.BUILD
        self.stages: list[StageResult] = []
        self.changes: list[str] = []
        self.parameters = 0

    def run(self) -> None:
        """All stages. Raises Problem, CannotTell, BoundsExceededError."""
        with self._during(Stage.BUILD):
            plan, draws_random_numbers = self._build()
        undisturbed = self.places.run("undisturbed", plan)
        with self._during(Stage.TRAIN):
            self._gang(undisturbed)
        with self._during(Stage.RESUME):
            self._resume(plan, undisturbed)
        self._conclude(plan, undisturbed, draws_random_numbers=draws_random_numbers)

    def _build(self) -> tuple[RunPlan, bool]:
        try:
            # So that no child has to import the model's code again.
            config = load_config(self.plan, self.directory)
            if type(config) in AutoModelForCausalLM._model_mapping:  # noqa: SLF001 - there is no public way to import it without building it
                AutoModelForCausalLM._model_mapping[type(config)]  # noqa: SLF001
        except Exception as error:
            raise CannotTell(f"{type(error).__name__}: {error}") from error
        ended = self._children({"twin": partial(bodies.twin, self.plan, self.directory, self.places)})["twin"]
        if ended.code != 0:
            raise CannotTell(ended.message or ended.problem)
        try:
            made = bodies.TwinFacts.model_validate(ended.value)
            twin_plan = RunPlan.model_validate_json(made.plan)
        except ValueError as error:
            raise CannotTell("the process that makes the twin answered with something else than a plan") from error
        self.changes, self.parameters = list(made.changes), made.parameters
        return twin_plan, made.draws_random_numbers

    def _resume(self, plan: RunPlan, undisturbed: RunContext) -> None:
        killed = self.places.run("killed", plan)
        self._gang(killed, killed_in_step=KILLED_IN_STEP)
        self._gang(dataclasses.replace(killed, attempt=1))
        wanted, found = (_digests(context.workspace.adapter) for context in (undisturbed, killed))
        if found != wanted:
            names = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
            raise Problem(
                Stage.RESUME,
                f"killed after a checkpoint and resumed, the run ends with other bytes than undisturbed: {', '.join(names)} differ",
            )

    def _conclude(self, plan: RunPlan, undisturbed: RunContext, *, draws_random_numbers: bool) -> None:
        """What needs one process each runs beside each other."""
        work: dict[Stage, Callable[[], Any]] = {Stage.SAVE: partial(bodies.check_saved, undisturbed)}
        started = time.monotonic()
        if plan.parallelism.world_size > 1:
            work[Stage.COMPARE] = self._compared(plan, undisturbed, draws_random_numbers=draws_random_numbers)
        before = {Stage.COMPARE: time.monotonic() - started}
        work[Stage.MERGE] = partial(bodies.merge, self.merge, undisturbed)
        self.stage = Stage.MERGE
        ended = self._children({stage.value: body for stage, body in work.items()})
        for stage in work:
            self._told(stage, before.get(stage, 0.0) + ended[stage.value].seconds, ended[stage.value].problem)
        for stage in work:
            _raise_for(stage, ended[stage.value])

    def _compared(self, plan: RunPlan, undisturbed: RunContext, *, draws_random_numbers: bool) -> Callable[[], Any]:
        """The comparison with one process, after the runs on ranks that it needs besides."""
        sharded = undisturbed
        if draws_random_numbers:
            plan = plan.model_copy(update={"method": quiet_method(plan.method)})
            sharded = self.places.run("quiet", plan, quiet=True)
        with self._during(Stage.COMPARE, is_whole=False):
            if sharded is not undisturbed:
                self._gang(sharded)
            exactly = self._exactly(plan)
        return partial(bodies.compare, bodies.Pair(sharded, self.places.run("alone", alone(plan), quiet=True)), exactly)

    def _exactly(self, plan: RunPlan) -> bodies.Pair | None:
        """The same in float32, trained on ranks; None where the job computes so itself, or float32 is what fails."""
        if computes_in(plan, stored_dtype(self.places.model)).itemsize >= torch.float32.itemsize:
            return None
        plan = exact(plan)
        sharded = self.places.run("exact", plan, quiet=True)
        try:
            self._gang(sharded)
        except Problem as problem:
            self.changes.append(f"gradients are compared in the job's own precision alone: in float32 {problem}")
            return None
        return bodies.Pair(sharded, self.places.run("exact-alone", alone(plan), quiet=True))

    def _gang(self, context: RunContext, killed_in_step: int | None = None) -> None:
        """Train on all ranks; with `killed_in_step` the first is killed then, and with it the others."""
        world_size = context.plan.parallelism.world_size
        name = context.claims_root.name
        store = self.places.root / f"{name}-{'killed' if killed_in_step else 'whole'}.store"
        ended = self._children(
            {
                f"{name}-rank-{rank}": partial(
                    bodies.run_rank, context, rank, world_size, f"file://{store}", killed_in_step if rank == 0 else None
                )
                for rank in range(world_size)
            },
            together=True,
        )
        reports = read_rank_reports(context.workspace.reports(Role.TRAIN.value, context.attempt))
        # What a rank says of one that was killed on purpose is no failure.
        is_killed = killed_in_step is not None
        cause = root_cause(report for report in reports if not (is_killed and report.failure is FailureClass.COLLECTIVE))
        if cause is not None:
            self._see_whether_ranks_can_meet(world_size)
            raise problem_of(self.stage, _said(cause), cause.hint, cause.failure)
        if not is_killed:
            for each in ended.values():
                _raise_for(self.stage, each)

    def _see_whether_ranks_can_meet(self, world_size: int) -> None:
        """Raises CannotTell where no two processes of this machine can: then a gang's failure says nothing about the job."""
        if world_size == 1:
            return
        store = f"file://{self.places.root / 'meeting.store'}"
        meetings: dict[str, Callable[[], Any]] = {
            f"meeting-{rank}": partial(bodies.meet, rank, world_size, store) for rank in range(world_size)
        }
        for ended in self._children(meetings, together=True).values():
            if ended.error:
                raise CannotTell(f"processes of this machine cannot reach each other, as two ranks would have to: {ended.error}")

    def _children(self, work: dict[str, Callable[[], Any]], *, together: bool = False) -> dict[str, Ended]:
        return run_children(work, self.places.root, self.bounds, together=together)

    @contextmanager
    def _during(self, stage: Stage, *, is_whole: bool = True) -> Iterator[None]:
        self.stage = stage
        started = time.monotonic()
        try:
            yield
        except (Problem, CannotTell, BoundsExceededError) as error:
            self._told(stage, time.monotonic() - started, str(error))
            raise
        if is_whole:
            self._told(stage, time.monotonic() - started)

    def _told(self, stage: Stage, seconds: float, problem: str = "") -> None:
        result = StageResult(stage=stage, seconds=round(seconds, 1), problem=problem.replace(str(self.places.root), "."))
        self.stages.append(result)
        self.told(result)


def _raise_for(stage: Stage, ended: Ended) -> None:
    if ended.code == -signal.SIGKILL:
        raise CannotTell(f"{ended.problem}. Nothing but a lack of memory kills it so")
    if ended.code != 0:
        raise problem_of(stage, ended.message or ended.problem, ended.hint, ended.failure)


def _said(cause: TerminationReport) -> str:
    """The message, with the exception's type where it is none of ours."""
    last = cause.exception.strip().splitlines()[-1:] or [""]
    kind = last[0].partition(":")[0]
    is_ours = kind.startswith("finetune_trainer.")
    return cause.message if is_ours or not kind.isidentifier() else f"{kind}: {cause.message}"


def _digests(directory: Path) -> dict[str, str]:
    return {path.name: file_sha256(path) for path in directory.iterdir()} if directory.is_dir() else {}

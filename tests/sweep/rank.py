"""What a rank of a gang does with a case: train, train again from a checkpoint, and then each rank its share of what is judged.

Rank 0 compares with a plain run, loads the adapter and has it merged; rank 1 meanwhile asks the gates for their verdict.
"""

import logging
import shutil
import time
import traceback
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers.utils import logging as transformers_logging

from finetune_job.layout import checkpoint_name
from finetune_job.plan.digest import plan_sha256
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.context import RunContext
from finetune_trainer.errors import ConfigError, InvariantError
from finetune_trainer.preflight import added_tokens
from finetune_trainer.processes import child
from finetune_trainer.ranks.gang import Gang
from finetune_trainer.ranks.watchdog import Heartbeat
from finetune_trainer.roles import merge as merge_role
from finetune_trainer.train.run import StopRequest, train
from tests.support.forked_base import start_forked
from tests.sweep import check, recording
from tests.sweep.bypass import without_own_refusals
from tests.sweep.case import SAVED_AT, Case
from tests.sweep.gangs import Answer
from tests.sweep.material import claims_of, copy_base, make_base, plan_of
from tests.sweep.observation import Failure, Observation, Verdict
from tests.sweep.verdict import verdict_of

# A rank here does what several programs of the product do, as forks in spite of its threads: to start them would take too long.
added_tokens._start = start_forked
child.threads = lambda _pid: {}

STAGES = (
    ("export", "export"),
    ("resume", "resume"),
    ("held_out_loss", "evaluation"),
    ("optimizer_step", "step"),
    ("_check_first_step", "step"),
    ("save", "save"),
    ("build_optimizer", "build"),
    ("build", "build"),
    ("merge", "merge"),
    ("claims_of", "resolve"),
    ("plan_of", "resolve"),
    ("with_trained_rows", "resolve"),
)
"""Function of the trainer -> stage; the first that is among an exception's frames."""


@dataclass(frozen=True)
class Request:
    """One case for a gang."""

    values: dict[str, str]
    material: Path
    directory: Path
    """Empty, for this case alone."""
    ignores_own_refusals: bool = False
    plant: str = ""
    """`module:name` of a context manager under which the trainer works, to see whether the oracle notices."""


def answer(gang: Gang, rank: int, request: Request) -> Answer:
    """(observation of rank 0, or rank 1's failure; verdict of rank 1)."""
    _prepare_process()
    case = Case(request.values)
    started = time.monotonic()
    seconds: dict[str, float] = {}
    evidence = None
    failures: list[Failure] = []
    shares_work = False
    try:
        plan = plan_of(case)
        alone = plan.parallelism.world_size == 1
        if not alone or rank == 0:
            own = Gang(0, 1, 0, torch.device("cpu"), None) if alone else gang
            shares_work = not alone
            with without_own_refusals(request.ignores_own_refusals), _planted(request.plant):
                runs = _train_twice(case, plan, request, own)
            shares_work = False
            seconds["train"] = time.monotonic() - started
            if rank == 0:
                context, first, second = runs
                evidence = check.training(case, plan, context, first, second)
                seconds["check"] = time.monotonic() - started
                with _planted(request.plant):
                    merge_role.merge(context)
                seconds["merge"] = time.monotonic() - started
                evidence.problems += check.merged(case, plan, context)
    except BaseException as error:  # noqa: BLE001 - whatever happens is what is observed
        failures.append(_failure(error))
    verdict: Verdict | None = None
    if rank == 1 and not request.ignores_own_refusals:
        began = time.monotonic()
        verdict = verdict_of(case, request.material, request.directory / "verdict")
        seconds["verdict"] = time.monotonic() - began
    seconds["all"] = time.monotonic() - started
    observation = Observation(
        failures=tuple(failures),
        problems=tuple(evidence.problems) if evidence else (),
        not_compared=tuple(evidence.not_compared) if evidence else (),
        seconds=seconds,
    )
    return Answer((observation, verdict), failure=f"{failures[0].kind}: {failures[0].text}" if failures and shares_work else "")


def _train_twice(
    case: Case, plan: RunPlan, request: Request, gang: Gang
) -> tuple[RunContext, list[recording.Recorded], list[recording.Recorded]]:
    """An undisturbed run, and one that continues from its checkpoint; every rank's notes of both, and where the second one
    wrote."""
    places = [request.directory / name for name in ("undisturbed", "resumed")]
    if gang.is_first:
        empty = [claims_of(case, plan, request.material, place) for place in places]
        make_base(case, empty[0])
        copy_base(*empty)
    gang.barrier()
    contexts = [_existing(plan, place) for place in places]
    first = recording.begin(quiet_step=check.QUIET_STEP)
    train(contexts[0], gang, StopRequest(), 0, Heartbeat())
    if gang.is_first:
        for step in range(1, SAVED_AT + 1):
            name = checkpoint_name(step)
            source = contexts[0].workspace.checkpoints / name
            if source.is_dir():
                shutil.copytree(source, contexts[1].workspace.checkpoints / name)
    gang.barrier()
    second = recording.begin()
    train(contexts[1], gang, StopRequest(), 0, Heartbeat())
    for notes in (first, second):
        # They belong to this process.
        notes.pieces = []
    return contexts[1], _of_all_ranks(first, gang), _of_all_ranks(second, gang)


def _of_all_ranks(notes: recording.Recorded, gang: Gang) -> list[recording.Recorded]:
    """The test's own ranks trust each other, and its notes are no messages of the product."""
    found: list[Any] = [notes] * gang.world_size
    if gang.world_size > 1:
        dist.all_gather_object(found, notes, group=gang.messages)
    return found


def _existing(plan: RunPlan, claims: Path) -> RunContext:
    return RunContext(plan, plan_sha256(plan), claims, 0).with_trained_rows()


def _planted(plant: str) -> AbstractContextManager[object]:
    module, _, name = plant.partition(":")
    planted: AbstractContextManager[object] = getattr(import_module(module), name)() if plant else nullcontext()
    return planted


def _failure(error: BaseException) -> Failure:
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    stage = next((stage for name, stage in STAGES if name in frames), "oracle")
    if stage in ("save", "build") and "train" in frames and "resume" in frames:
        stage = "resume"
    return Failure(
        stage=stage,
        kind=type(error).__name__,
        text=" ".join(str(error).split())[:600],
        is_own_refusal=isinstance(error, ConfigError | InvariantError),
    )


@cache
def _prepare_process() -> None:
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    transformers_logging.disable_progress_bar()
    recording.install()

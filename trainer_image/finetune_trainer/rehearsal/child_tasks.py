"""Tasks that a rehearsal runs in child processes. Checks raise if a result differs from what a library or one process computes.

This module imports torch; run.py forks these tasks from a process that has already imported everything.
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file
from transformers.utils import logging as transformers_logging

from finetune_job.failures import Outcome, TerminationReport
from finetune_job.layout import WorkspaceLayout, checkpoint_name
from finetune_job.plan.run_plan import RunPlan
from finetune_memory.optimizers import FORMS
from finetune_trainer.checkpoint.load import RangeReader, full_parameters
from finetune_trainer.checkpoint.manifest import MANIFEST, Manifest, decode_manifest
from finetune_trainer.context import RunContext
from finetune_trainer.errors import TrainerError
from finetune_trainer.json_lines import read_lines
from finetune_trainer.model.adapters import attach, has_first_values, plain_lora, stored_names
from finetune_trainer.model.load import build_with_lazy_zeros, load_base_model, stored_dtype
from finetune_trainer.ranks.gang import joined
from finetune_trainer.rehearsal.comparison import Gradients, coarsest_dtype, differing_gradients, differing_lines, tolerance_of
from finetune_trainer.rehearsal.scaled_model import RehearsalPaths, make_scaled_model
from finetune_trainer.train import rank as rank_module
from finetune_trainer.weights.headers import ADAPTER_FILE

MEETING_SECONDS = 10
_CPU = torch.device("cpu")
MergeRole = Callable[[RunContext], TerminationReport]
"""The merge role of a job. It is passed as an argument, because this package must not import roles."""


@dataclass(frozen=True)
class Pair:
    """Two runs over the same global batches: sharded over ranks, and alone in one process."""

    sharded: RunContext
    alone: RunContext


class RehearsalError(TrainerError):
    """The rehearsal found a fault for which the trainer raised no exception."""


def make_model_in_child(plan: RunPlan, directory: Path, paths: RehearsalPaths) -> str:
    """Make the scaled-down model and return its description, a ScaledModel as JSON."""
    _log_plainly()
    return make_scaled_model(plan, directory, paths).model_dump_json()


def run_rank(context: RunContext, rank: int, world_size: int, store: str) -> None:
    """Train as one rank, as under torchrun. Raises RehearsalError with the report's message."""
    _log_plainly()
    report = rank_module.run_rank(
        context, rank=rank, world_size=world_size, local_rank=rank, node_rank=0, observe_port=0, init_method=store
    )
    if report.outcome is not Outcome.SUCCEEDED:
        raise RehearsalError(report.message, report.hint)


def copy_up_to(step: int, whole: WorkspaceLayout, cut: WorkspaceLayout) -> None:
    """Copy the files of `whole` to `cut` as if the run had been killed after this step's checkpoint. `cut` already has data."""
    later = {path.name for path in whole.checkpoints.iterdir()} - {checkpoint_name(step)}
    left_out = shutil.ignore_patterns(*later, whole.adapter.name, whole.prepared.name)
    shutil.copytree(whole.root, cut.root, symlinks=True, dirs_exist_ok=True, ignore=left_out)


def compare(pair: Pair, exact: Pair | None) -> None:
    """Train in this process alone and compare losses and gradients with those of the ranks. Raises RehearsalError.

    `exact`: the same two runs in float32, for a job that computes in fewer bits, where rounding hides differences.
    """
    alone_exactly = None
    if exact is not None:
        run_rank(exact.alone, 0, 1, "")
        _compare(exact, None)
        alone_exactly = _moments(exact.alone, 1)
    run_rank(pair.alone, 0, 1, "")
    _compare(pair, alone_exactly)


def check_saved(context: RunContext) -> None:
    """Check that the saved adapter has the values of the exported checkpoint, has learnt, and loads. Raises RehearsalError."""
    _log_plainly()
    if not context.plan.method.trains_adapter:
        return
    directory, manifest = _exported_checkpoint(context)
    fresh = attach(load_base_model(context.plan, context.base_model, _CPU), context.plan)
    names = stored_names(fresh)
    before = {names[name]: parameter.detach() for name, parameter in fresh.named_parameters() if name in names}
    saved = load_file(context.workspace.adapter / ADAPTER_FILE)
    trained = {names[name]: tensor for name, tensor in full_parameters(directory, manifest)}
    first = load_file(context.workspace.first_values) if has_first_values(fresh) else {}
    before |= first
    if set(before) != set(trained):
        raise RehearsalError(f"{len(trained)} tensors were trained, {len(before)} should be")
    for name, values in trained.items():
        tensor = plain_lora(values, first[name], name) if name in first else values
        if name not in saved:
            raise RehearsalError(f"the adapter file has {len(saved)} tensors of {len(trained)}: {name} is missing")
        if saved[name].shape != tensor.shape or not torch.equal(saved[name], tensor):
            raise RehearsalError(f"the adapter file holds other values for {name} than were trained")
    if all(torch.equal(tensor.to(before[name].dtype), before[name]) for name, tensor in trained.items()):
        raise RehearsalError("after all steps every trained value is what it was before the first one")
    base = build_with_lazy_zeros(context.plan, context.base_model)
    loaded = PeftModel.from_pretrained(base, context.workspace.adapter)
    state = get_peft_model_state_dict(loaded, save_embedding_layers=False)
    for name, tensor in saved.items():
        # PEFT holds whole modules in the base's element type, whatever their type in training was.
        if name not in state or not torch.equal(state[name], tensor.to(state[name].dtype)):
            raise RehearsalError(f"PEFT does not load {name} from the adapter file")


def merge(role: MergeRole, context: RunContext) -> dict[str, str]:
    """Run the merge role on the trained model. Raises the role's exceptions, and RehearsalError if a result is missing."""
    _log_plainly()
    facts = role(context).facts
    if context.plan.merge.enabled and not context.output.merged.is_dir():
        raise RehearsalError("the merge ended without a merged model")
    if context.plan.merge.enabled and "verification_sha256" not in facts:
        raise RehearsalError("the merged model was not verified")
    return facts


def meet(rank: int, world_size: int, store: str) -> None:
    """Join the other ranks and leave. Raises gloo's exceptions if processes on this machine cannot reach each other."""
    with joined(rank, world_size, rank, store, MEETING_SECONDS) as gang:
        gang.barrier()


def _compare(pair: Pair, exact: Gradients | None) -> None:
    tolerance = tolerance_of(coarsest_dtype(pair.sharded.plan, stored_dtype(pair.sharded.base_model)))
    on_ranks, alone = (_history(context) for context in (pair.sharded, pair.alone))
    for sentence in differing_lines(on_ranks, alone, tolerance):
        raise RehearsalError(sentence)
    for step in range(1, tolerance.steps + 1):
        for sentence in differing_gradients(_moments(pair.sharded, step), _moments(pair.alone, step), tolerance, exact):
            raise RehearsalError(f"in step {step} {sentence}")


def _moments(context: RunContext, step: int) -> dict[str, torch.Tensor]:
    """Return the first moments after a step, counted from 1. After step 1 they are a multiple of the gradient."""
    return dict(_states(context, FORMS[context.plan.training.optimizer].tensors[0], step))


def _states(context: RunContext, kind: str, step: int) -> Iterator[tuple[str, torch.Tensor]]:
    directory = context.workspace.checkpoints / checkpoint_name(step)
    reader = RangeReader(directory, decode_manifest((directory / MANIFEST).read_bytes()))
    for name in reader.names:
        shape, dtype = reader.form(name)
        tensor = torch.empty(shape, dtype=dtype)
        reader.read_into(kind, name, 0, tensor.view(-1))
        yield name, tensor.double()


def _exported_checkpoint(context: RunContext) -> tuple[Path, Manifest]:
    checkpoints = sorted(path for path in context.workspace.checkpoints.iterdir() if (path / MANIFEST).is_file())
    manifest = decode_manifest((checkpoints[-1] / MANIFEST).read_bytes())
    if context.plan.evaluation.load_best_model_at_end and manifest.best_step is not None:
        best = context.workspace.checkpoints / checkpoint_name(manifest.best_step)
        return best, decode_manifest((best / MANIFEST).read_bytes())
    return checkpoints[-1], manifest


def _history(context: RunContext) -> list[dict[str, Any]]:
    return read_lines(context.workspace.history.read_text())


def _log_plainly() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stderr)
    transformers_logging.disable_progress_bar()

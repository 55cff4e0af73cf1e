"""The state of each optimizer (finetune_memory/optimizers.py), created before the first step and checked after every load.

A state that is created late can silently stay empty after a load, and the resumed run then differs.
"""

from __future__ import annotations

import torch

from finetune_job.api.training import OptimizerName
from finetune_memory.optimizers import FORMS, StateForm
from finetune_trainer.checkpoint.manifest import OptimizerEntry
from finetune_trainer.errors import CheckpointError, InvariantError
from finetune_trainer.ranks.gang import Gang

STEP = "step"


def state_form(optimizer: torch.optim.Optimizer) -> StateForm:
    """What this optimizer keeps. Raises InvariantError for one whose state is not known here."""
    name = type(optimizer).__name__
    if name not in list(OptimizerName):
        raise InvariantError(f"checkpoints do not know the state of {name}")
    if isinstance(optimizer, torch.optim.SGD) and not optimizer.defaults["momentum"]:
        return StateForm((), is_counted=False)
    return FORMS[OptimizerName(name)]


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter the state that the optimizer would create at its first step."""
    form = state_form(optimizer)
    for parameter in _parameters(optimizer):
        if optimizer.state[parameter]:
            continue
        state = {kind: torch.zeros_like(parameter, memory_format=torch.preserve_format) for kind in form.tensors}
        if form.is_counted:
            # A fused step reads the count on the parameter's own device.
            device = parameter.device if optimizer.defaults.get("fused") else torch.device("cpu")
            state[STEP] = torch.zeros((), dtype=torch.float32, device=device)
        optimizer.state[parameter] = state


def described(optimizer: torch.optim.Optimizer) -> OptimizerEntry:
    """What a manifest says of the optimizer, from the state itself.

    Raises InvariantError where a parameter lacks some state, or has more, or other shapes, or another count than the others.
    """
    form = state_form(optimizer)
    expected = {*form.tensors, *([STEP] if form.is_counted else [])}
    counts = set()
    for parameter in _parameters(optimizer):
        state = optimizer.state.get(parameter, {})
        if set(state) != expected:
            raise InvariantError(f"a trainable parameter of shape {tuple(parameter.shape)} has optimizer state {sorted(state)}")
        if any(state[kind].shape != parameter.shape or state[kind].dtype != parameter.dtype for kind in form.tensors):
            raise InvariantError(f"optimizer state of a trainable parameter of shape {tuple(parameter.shape)} has another form")
        if form.is_counted and parameter.numel():
            counts.add(float(state[STEP]))
    if len(counts) > 1:
        raise InvariantError(f"optimizer states are at different steps: {sorted(counts)}")
    step = (counts.pop() if counts else 0.0) if form.is_counted else None
    return OptimizerEntry(name=type(optimizer).__name__, tensors=list(form.tensors), step=step)


def agreed(optimizer: torch.optim.Optimizer, gang: Gang) -> OptimizerEntry:
    """What the manifest says of all ranks: one that keeps no element of any parameter cannot know the count.

    Called by all ranks together. Raises InvariantError where they are at different steps, and where `described` does.
    """
    entry = described(optimizer)
    knows = any(parameter.numel() for parameter in _parameters(optimizer))
    counts = {count for count in gang.gather(entry.step if knows else None) if count is not None}
    if len(counts) > 1:
        raise InvariantError(f"optimizer states of the ranks are at different steps: {sorted(counts)}")
    return entry.model_copy(update={"step": counts.pop()}) if counts else entry


def check_kind(optimizer: torch.optim.Optimizer, entry: OptimizerEntry) -> None:
    """Raises CheckpointError where the checkpoint holds the state of another optimizer."""
    form = state_form(optimizer)
    if entry.name != type(optimizer).__name__ or tuple(entry.tensors) != form.tensors or (entry.step is None) is form.is_counted:
        raise CheckpointError(f"the checkpoint holds state of {entry.name} {entry.tensors}, not of {type(optimizer).__name__}")


def restore_count(optimizer: torch.optim.Optimizer, entry: OptimizerEntry) -> None:
    """Set every parameter's count, and check that all state is as the manifest says. Raises InvariantError where it is not."""
    for parameter in _parameters(optimizer):
        if entry.step is not None:
            optimizer.state[parameter][STEP].fill_(entry.step)
    found = described(optimizer)
    if found != entry and any(parameter.numel() for parameter in _parameters(optimizer)):
        raise InvariantError(f"after loading the optimizer is {found}, the manifest says {entry}")


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]

"""The content of a checkpoint: the flat ranges of trainable parameters that this rank holds, and their optimizer state.

All kinds of sharding used here cut parameters into contiguous ranges of their row-major values, so they share one format, which
any world size can read. Optimizer state is created before the first step, so that loading can fill it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard

from finetune_job.api.training import OptimizerName
from finetune_memory.optimizers import FORMS, StateForm
from finetune_trainer.checkpoint.manifest import OptimizerEntry
from finetune_trainer.errors import CheckpointError, InvariantError
from finetune_trainer.ranks.gang import Gang

PARAMETER = "param"
"""Kind of a parameter's own values. The kind of an optimizer state tensor is the optimizer's name for it."""
STEP = "step"
"""Name of the step count in the state of optimizers that have one."""
WRAPPER_PREFIX = "_fsdp_wrapped_module."
"""Prefix that FSDP 1 puts into module names."""


@dataclass(frozen=True)
class ParameterRange:
    """Elements [start, stop) of a parameter, which are at [offset, offset + stop - start) in `holder`'s local values."""

    name: str
    """Name of the parameter in the model before sharding."""
    shape: tuple[int, ...]
    """Global shape of the parameter."""
    start: int
    stop: int
    holder: nn.Parameter
    """The parameter object that the optimizer updates."""
    offset: int

    def values(self, kind: str, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """Return a writable 1-dimensional view of this range of the parameter or of one of its state tensors, on its device."""
        return self.parameter_values() if kind == PARAMETER else self._part(optimizer.state[self.holder][kind])

    def parameter_values(self) -> torch.Tensor:
        """Return a writable 1-dimensional view of this range of the parameter, on its device."""
        return self._part(self.holder.detach())

    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local.view(-1)[self.offset : self.offset + self.stop - self.start]


def share(ranges: Iterable[ParameterRange], rank: int, world_size: int) -> list[ParameterRange]:
    """Divide ranges that every rank holds: return the parts that this rank writes, so that each value is written once."""
    return [
        replace(piece, start=first, stop=last, offset=piece.offset + first - piece.start)
        for piece in ranges
        for size in (piece.stop - piece.start,)
        for first in (piece.start + size * rank // world_size,)
        for last in (piece.start + size * (rank + 1) // world_size,)
    ]


def pieces(model: nn.Module, *, frozen: bool = False) -> list[ParameterRange]:
    """Return this rank's range of each trainable parameter, even if empty, sorted by name. frozen: include frozen parameters."""
    if isinstance(model, FullyShardedDataParallel):
        ranges = list(_flat_ranges(model))
    else:
        ranges = [_dim0_range(name, parameter) for name, parameter in model.named_parameters()]
    return sorted((piece for piece in ranges if frozen or piece.holder.requires_grad), key=lambda piece: piece.name)


def _dim0_range(name: str, parameter: nn.Parameter) -> ParameterRange:
    shape, start = tuple(parameter.shape), 0
    local = parameter.detach()
    if isinstance(local, DTensor):
        if len(local.placements) != 1 or not isinstance(local.placements[0], Shard) or local.placements[0].dim != 0:
            raise InvariantError(
                f"{name} is sharded as {local.placements}; checkpoints support sharding along dim 0 of one mesh axis only"
            )
        mesh = local.device_mesh
        row = local.numel() // shape[0] if shape[0] else 0
        rows = -(-shape[0] // mesh.size())
        start = min(mesh.get_local_rank() * rows, shape[0]) * row
        local = local.to_local()
    return ParameterRange(name, shape, start, start + local.numel(), parameter, 0)


def _flat_ranges(model: FullyShardedDataParallel) -> Iterator[ParameterRange]:
    for unit_name, unit in model.named_modules():
        handle = getattr(unit, "_handle", None) if isinstance(unit, FullyShardedDataParallel) else None
        if handle is None:
            continue
        flat = handle.flat_param
        prefix = f"{unit_name}.".replace(WRAPPER_PREFIX, "") if unit_name else ""
        # torch 2.15 keeps the positions of parameters within a flat parameter only in private attributes.
        names, shapes, originals = flat._fqns, flat._shapes, flat._params or [None] * len(flat._fqns)  # noqa: SLF001
        for fqn, shape, info, original in zip(names, shapes, flat._shard_param_infos, originals, strict=True):  # noqa: SLF001
            holder = original if original is not None else flat
            name = f"{prefix}{fqn.replace(WRAPPER_PREFIX, '')}"
            if not info.in_shard:
                yield ParameterRange(name, tuple(shape), 0, 0, holder, 0)
                continue
            # The optimizer holds either the flat parameter, in which this range has an offset, or a view of exactly this range.
            offset = 0 if original is not None else info.offset_in_shard
            yield ParameterRange(name, tuple(shape), info.intra_param_start_idx, info.intra_param_end_idx + 1, holder, offset)


def check_complete(shapes: dict[str, tuple[int, ...]], ranges: Iterable[ParameterRange]) -> None:
    """Check that the ranges cover exactly the trainable parameters of the unsharded model. Raises InvariantError."""
    names = {piece.name: piece.shape for piece in ranges}
    if names != shapes:
        different = sorted(set(names.items()) ^ set(shapes.items()))
        raise InvariantError(f"sharding changed what is trained, first: {different[:4]}")


def state_form(optimizer: torch.optim.Optimizer) -> StateForm:
    """Return the form of this optimizer's state. Raises InvariantError for an unknown optimizer."""
    name = type(optimizer).__name__
    if name not in list(OptimizerName):
        raise InvariantError(f"checkpoints do not support the state of {name}")
    if isinstance(optimizer, torch.optim.SGD) and not optimizer.defaults["momentum"]:
        return StateForm((), is_counted=False)
    return FORMS[OptimizerName(name)]


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter without state the state that the optimizer would create at its first step."""
    form = state_form(optimizer)
    for parameter in _parameters(optimizer):
        if optimizer.state[parameter]:
            continue
        state = {kind: torch.zeros_like(parameter, memory_format=torch.preserve_format) for kind in form.tensors}
        if form.is_counted:
            # A fused step reads the count on the parameter's own device; other steps read it on the CPU.
            device = parameter.device if optimizer.defaults.get("fused") else torch.device("cpu")
            state[STEP] = torch.zeros((), dtype=torch.float32, device=device)
        optimizer.state[parameter] = state


def optimizer_entry(optimizer: torch.optim.Optimizer) -> OptimizerEntry:
    """Return the manifest's entry for the optimizer, made from the optimizer's state.

    Raises InvariantError if a parameter's state lacks tensors, has extra ones or wrong shapes, or if step counts differ.
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


def agreed_optimizer_entry(optimizer: torch.optim.Optimizer, gang: Gang) -> OptimizerEntry:
    """Return the manifest's entry for the optimizer on all ranks. A rank that holds no parameter elements has no step count.

    All ranks call this together. Raises InvariantError if they are at different steps, and as `optimizer_entry` does.
    """
    entry = optimizer_entry(optimizer)
    knows = any(parameter.numel() for parameter in _parameters(optimizer))
    counts = {count for count in gang.gather(entry.step if knows else None, float | None) if count is not None}
    if len(counts) > 1:
        raise InvariantError(f"optimizer states of the ranks are at different steps: {sorted(counts)}")
    return entry.model_copy(update={"step": counts.pop()}) if counts else entry


def check_kind(optimizer: torch.optim.Optimizer, entry: OptimizerEntry) -> None:
    """Raise CheckpointError if the checkpoint holds the state of another optimizer."""
    form = state_form(optimizer)
    if entry.name != type(optimizer).__name__ or tuple(entry.tensors) != form.tensors or (entry.step is None) is form.is_counted:
        raise CheckpointError(f"the checkpoint holds state of {entry.name} {entry.tensors}, not of {type(optimizer).__name__}")


def restore_count(optimizer: torch.optim.Optimizer, entry: OptimizerEntry) -> None:
    """Set every parameter's step count. Raises InvariantError if the resulting state does not match the manifest."""
    for parameter in _parameters(optimizer):
        if entry.step is not None:
            optimizer.state[parameter][STEP].fill_(entry.step)
    restored = optimizer_entry(optimizer)
    if restored != entry and any(parameter.numel() for parameter in _parameters(optimizer)):
        raise InvariantError(f"after loading, the optimizer is {restored}, but the manifest says {entry}")


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]

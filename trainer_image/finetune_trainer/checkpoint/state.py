"""What a checkpoint holds: each trainable parameter and its AdamW moments, as the flat ranges that this rank keeps.

A piece is a contiguous range of a parameter flattened in row-major order. Every kind of sharding used here (none, FSDP 1 with flat
or original parameters, FSDP 2 along dim 0) cuts parameters into such ranges, so one format serves all, and a checkpoint of one
kind and world size can be read by another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard

from finetune_trainer.errors import InvariantError

PARAMETER, FIRST_MOMENT, SECOND_MOMENT, STEP = "param", "exp_avg", "exp_avg_sq", "step"
KINDS = (PARAMETER, FIRST_MOMENT, SECOND_MOMENT)
"""Tensors per parameter; the moments by AdamW's own names."""
WRAPPER_PREFIX = "_fsdp_wrapped_module."
"""What FSDP 1 puts into module names."""


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of the parameter `name`, kept at [offset, offset + stop - start) of `holder`'s local values."""

    name: str
    """As in the model before it was sharded."""
    shape: tuple[int, ...]
    """Global."""
    start: int
    stop: int
    holder: nn.Parameter
    """The parameter that the optimizer knows."""
    offset: int

    def values(self, kind: str, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """A writable 1-dimensional view of this piece of the parameter or of one of its moments, on its own device."""
        tensor = self.holder.detach() if kind == PARAMETER else optimizer.state[self.holder][kind]
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local.view(-1)[self.offset : self.offset + self.stop - self.start]


def pieces(model: nn.Module) -> list[Piece]:
    """This rank's pieces of all trainable parameters, empty ones included, in the order of their names."""
    if isinstance(model, FullyShardedDataParallel):
        found = list(_flat_pieces(model))
    else:
        found = [_dim0_piece(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return sorted(found, key=lambda piece: piece.name)


def _dim0_piece(name: str, parameter: nn.Parameter) -> Piece:
    shape, start = tuple(parameter.shape), 0
    local = parameter.detach()
    if isinstance(local, DTensor):
        if len(local.placements) != 1 or not isinstance(local.placements[0], Shard) or local.placements[0].dim != 0:
            raise InvariantError(f"{name} is sharded as {local.placements}; checkpoints know sharding along dim 0 of one mesh axis")
        mesh = local.device_mesh
        row = local.numel() // shape[0] if shape[0] else 0
        rows = -(-shape[0] // mesh.size())
        start = min(mesh.get_local_rank() * rows, shape[0]) * row
        local = local.to_local()
    return Piece(name, shape, start, start + local.numel(), parameter, 0)


def _flat_pieces(model: FullyShardedDataParallel) -> Iterator[Piece]:
    for unit_name, unit in model.named_modules():
        handle = getattr(unit, "_handle", None) if isinstance(unit, FullyShardedDataParallel) else None
        if handle is None:
            continue
        flat = handle.flat_param
        prefix = f"{unit_name}.".replace(WRAPPER_PREFIX, "") if unit_name else ""
        # torch 2.15 keeps where each parameter lies in a flat one only in attributes that it calls private.
        names, shapes, originals = flat._fqns, flat._shapes, flat._params or [None] * len(flat._fqns)  # noqa: SLF001
        for fqn, shape, info, original in zip(names, shapes, flat._shard_param_infos, originals, strict=True):  # noqa: SLF001
            holder = original if original is not None else flat
            if not holder.requires_grad:
                continue
            name = f"{prefix}{fqn.replace(WRAPPER_PREFIX, '')}"
            if not info.in_shard:
                yield Piece(name, tuple(shape), 0, 0, holder, 0)
                continue
            # The optimizer knows either the flat parameter or, with use_orig_params, a view of exactly this range.
            offset = 0 if original is not None else info.offset_in_shard
            yield Piece(name, tuple(shape), info.intra_param_start_idx, info.intra_param_end_idx + 1, holder, offset)


def create_moments(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter the state that AdamW would create at its first step, so that there is always something to load into.

    A state that is created late can silently stay empty after a load, and the resumed run then differs.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    STEP: torch.tensor(0.0, dtype=torch.float32),
                    FIRST_MOMENT: torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    SECOND_MOMENT: torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }


def optimizer_step(optimizer: torch.optim.Optimizer) -> float:
    """The step that all parameters' states agree on. Raises InvariantError where they do not, or where one has no moments."""
    steps = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if set(state) != {STEP, FIRST_MOMENT, SECOND_MOMENT}:
                raise InvariantError(f"a trainable parameter of shape {tuple(parameter.shape)} has optimizer state {sorted(state)}")
            if state[FIRST_MOMENT].shape != parameter.shape or state[SECOND_MOMENT].shape != parameter.shape:
                raise InvariantError(f"moments of a trainable parameter of shape {tuple(parameter.shape)} have another shape")
            if parameter.numel():
                steps.add(float(state[STEP]))
    if len(steps) > 1:
        raise InvariantError(f"optimizer states are at different steps: {sorted(steps)}")
    return steps.pop() if steps else 0.0


def set_optimizer_step(optimizer: torch.optim.Optimizer, step: float) -> None:
    """Set the step of every parameter's state."""
    for state in optimizer.state.values():
        state[STEP].fill_(step)


def check_complete(shapes: dict[str, tuple[int, ...]], found: Iterable[Piece]) -> None:
    """The pieces name exactly the trainable parameters that the model had before it was sharded. Raises InvariantError."""
    names = {piece.name: piece.shape for piece in found}
    if names != shapes:
        different = sorted(set(names.items()) ^ set(shapes.items()))
        raise InvariantError(f"sharding changed what is trained, first: {different[:4]}")

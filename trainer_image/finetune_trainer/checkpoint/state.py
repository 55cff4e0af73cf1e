"""What a checkpoint holds: each trainable parameter and its optimizer state, as the flat ranges that this rank keeps.

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

PARAMETER = "param"
"""Kind of a parameter's own values; tensors of optimizer state are called as the optimizer calls them."""
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
        """A writable 1-dimensional view of this piece of the parameter or of one of its states, on its own device."""
        return self.parameter_values() if kind == PARAMETER else self._part(optimizer.state[self.holder][kind])

    def parameter_values(self) -> torch.Tensor:
        """A writable 1-dimensional view of this piece of the parameter, on its own device."""
        return self._part(self.holder.detach())

    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local.view(-1)[self.offset : self.offset + self.stop - self.start]


def pieces(model: nn.Module, *, frozen: bool = False) -> list[Piece]:
    """This rank's pieces of all trainable parameters, empty ones included, in the order of their names; `frozen`: of all."""
    if isinstance(model, FullyShardedDataParallel):
        found = list(_flat_pieces(model))
    else:
        found = [_dim0_piece(name, parameter) for name, parameter in model.named_parameters()]
    return sorted((piece for piece in found if frozen or piece.holder.requires_grad), key=lambda piece: piece.name)


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
            name = f"{prefix}{fqn.replace(WRAPPER_PREFIX, '')}"
            if not info.in_shard:
                yield Piece(name, tuple(shape), 0, 0, holder, 0)
                continue
            # The optimizer knows either the flat parameter or, with use_orig_params, a view of exactly this range.
            offset = 0 if original is not None else info.offset_in_shard
            yield Piece(name, tuple(shape), info.intra_param_start_idx, info.intra_param_end_idx + 1, holder, offset)


def check_complete(shapes: dict[str, tuple[int, ...]], found: Iterable[Piece]) -> None:
    """The pieces name exactly the trainable parameters that the model had before it was sharded. Raises InvariantError."""
    names = {piece.name: piece.shape for piece in found}
    if names != shapes:
        different = sorted(set(names.items()) ^ set(shapes.items()))
        raise InvariantError(f"sharding changed what is trained, first: {different[:4]}")

"""One rank's file: copied to host memory at a step boundary, then written, made durable and hashed in one pass.

Written here and not by the safetensors library, whose save hides error numbers, keeps Python's lock and needs a second pass to
hash. Format: 8 bytes little-endian header length, a JSON header, then the data (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from finetune_trainer.checkpoint.manifest import FileEntry, PieceEntry
from finetune_trainer.checkpoint.names import tensor_key
from finetune_trainer.checkpoint.optimizer_state import state_form
from finetune_trainer.checkpoint.state import PARAMETER, Piece
from finetune_trainer.weights.rounding import TORCH_DTYPES

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_CHUNK_BYTES = 16 << 20
"""Written and hashed at a time, so that the bytes are still in a cache when they are hashed."""
_ALIGNMENT = 8


@dataclass(frozen=True)
class Snapshot:
    """This rank's state at a step boundary, in host memory of its own."""

    tensors: Mapping[str, torch.Tensor]
    pieces: tuple[PieceEntry, ...]


def snapshot(found: list[Piece], optimizer: torch.optim.Optimizer, reused: Mapping[str, torch.Tensor]) -> Snapshot:
    """Copy parameters and optimizer state to host memory; `reused`: the tensors of an earlier snapshot, to be overwritten."""
    kinds = (PARAMETER, *state_form(optimizer).tensors)
    tensors = {}
    on_device = False
    for piece in found:
        for kind in kinds if piece.stop > piece.start else ():
            values = piece.values(kind, optimizer)
            key = tensor_key(kind, piece.name)
            copy = reused.get(key)
            if copy is None:
                copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
            tensors[key] = copy.copy_(values, non_blocking=True)
            on_device |= values.is_cuda
    if on_device:
        torch.cuda.synchronize()
    return Snapshot(
        tensors,
        tuple(
            PieceEntry(
                name=piece.name,
                shape=list(piece.shape),
                dtype=str(piece.holder.dtype).removeprefix("torch."),
                start=piece.start,
                stop=piece.stop,
            )
            for piece in found
        ),
    )


def write_rank_file(path: Path, taken: Snapshot) -> FileEntry:
    """Write a snapshot durably; its name, size and digest. Raises OSError as the file system does."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as file:
        for part in (_header(taken.tensors), *(_bytes(tensor) for tensor in taken.tensors.values())):
            for start in range(0, len(part), _CHUNK_BYTES):
                chunk = part[start : start + _CHUNK_BYTES]
                digest.update(chunk)
                size += len(chunk)
                while chunk:
                    chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())
    return FileEntry(name=path.name, size=size, sha256=digest.hexdigest(), pieces=list(taken.pieces))


def _header(tensors: Mapping[str, torch.Tensor]) -> memoryview:
    content, offset = {}, 0
    for key, tensor in tensors.items():
        stop = offset + tensor.numel() * tensor.element_size()
        content[key] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, stop]}
        offset = stop
    encoded = json.dumps(content, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    return memoryview(struct.pack("<Q", len(encoded)) + encoded)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data

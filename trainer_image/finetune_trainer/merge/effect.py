"""Determines whether a merge has changed anything."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from finetune_trainer.merge.chunks import CHUNK_BYTES
from finetune_trainer.merge.plan import OutputTensor, Shard
from finetune_trainer.merge.sources import Sources
from finetune_trainer.weights.headers import DTYPE_BYTES, Checkpoint, TensorHeader
from finetune_trainer.weights.rounding import READ_DTYPES


def has_effect(files: Mapping[Shard, Path], base: Checkpoint) -> bool:
    """Whether any value of the merged model differs from the base's, rounded to the same dtype. Stops at the first difference.

    files: the written shards.
    """
    sources = Sources({*files.values(), *(tensor.file for tensor in base.tensors.values())})
    try:
        return any(
            _differs(tensor, path, base.tensors.get(tensor.name), sources)
            for shard, path in files.items()
            for tensor in shard.tensors
            if tensor.is_changed_by_adapter
        )
    finally:
        sources.close()


def _differs(tensor: OutputTensor, path: Path, original: TensorHeader | None, sources: Sources) -> bool:
    if original is None or original.shape != tensor.shape:
        return True
    merged = TensorHeader(tensor.name, tensor.dtype, tensor.shape, path, tensor.offset)
    num_elements = tensor.num_bytes // DTYPE_BYTES[tensor.dtype]
    block = CHUNK_BYTES // DTYPE_BYTES[original.dtype]

    def values(header: TensorHeader, start: int) -> torch.Tensor:
        width = DTYPE_BYTES[header.dtype]
        data = torch.empty(min(block, num_elements - start) * width, dtype=torch.uint8)
        sources.read_into(header, start * width, data.numpy().data)
        return data.view(READ_DTYPES[header.dtype])

    for start in range(0, num_elements, block):
        written = values(merged, start)
        if not torch.equal(written, values(original, start).to(written.dtype)):
            return True
    return False

"""Reads a checkpoint on disk as a StoredModel. Weights are read only to compare stored copies of a tied parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finetune_trainer.weights.errors import BrokenCheckpointError
from finetune_trainer.weights.families import family_of
from finetune_trainer.weights.headers import Checkpoint, TensorHeader
from finetune_trainer.weights.stored import StoredModel

BLOCK_BYTES = 8 << 20


def read_stored_model(base: Checkpoint, config: Mapping[str, Any]) -> StoredModel:
    """Read the names of a model's parameters. config: content of config.json. Raises BrokenCheckpointError for incomplete files.

    Like transformers, this does not tie stored copies that differ, whatever config.json says (that of T5 1.1 is wrong).
    """
    model = StoredModel(base.tensors, config, family_of(config, base.tensors))
    differing = differing_ties(model)
    return StoredModel(base.tensors, config, model.family, differing) if differing else model


def differing_ties(model: StoredModel) -> set[str]:
    """Return the paths whose stored values differ from those of the parameter to which config.json ties them."""
    return {
        path
        for tie in model.ties
        for path in tie.stored[1:]
        if not have_same_values(model.parameters[tie.source].parts[0].header, model.parameters[path].parts[0].header)
    }


def have_same_values(first: TensorHeader, second: TensorHeader) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    with first.file.open("rb") as first_file, second.file.open("rb") as second_file:
        first_file.seek(first.offset)
        second_file.seek(second.offset)
        remaining = first.num_bytes
        while remaining:
            size = min(BLOCK_BYTES, remaining)
            block = first_file.read(size)
            if len(block) != size:
                raise BrokenCheckpointError(f"{first.file} ended inside tensor {first.name} while it was read. Fetch it again.")
            if block != second_file.read(size):
                return False
            remaining -= size
    return True

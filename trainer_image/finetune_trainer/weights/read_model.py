"""A checkpoint on disk -> StoredModel. Reads weights only where two stored copies of one tied parameter have to be compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finetune_trainer.weights.errors import BrokenCheckpointError
from finetune_trainer.weights.families import family_of
from finetune_trainer.weights.headers import Checkpoint, TensorHeader
from finetune_trainer.weights.stored import StoredModel

BLOCK_BYTES = 8 << 20


def read_stored_model(base: Checkpoint, config: Mapping[str, Any]) -> StoredModel:
    """config: the parsed config.json. Raises BrokenCheckpointError if the files are incomplete.

    Like transformers, does not tie stored copies that differ, whatever config.json says (T5 1.1 says one thing and means
    another).
    """
    model = StoredModel(base.tensors, config, family_of(config, base.tensors))
    differing = differing_ties(model)
    return StoredModel(base.tensors, config, model.family, differing) if differing else model


def differing_ties(model: StoredModel) -> set[str]:
    """Paths whose stored values differ from those of the parameter that config.json ties them to."""
    return {
        path
        for tie in model.ties
        for path in tie.stored[1:]
        if not have_same_values(model.parameters[tie.source].parts[0].header, model.parameters[path].parts[0].header)
    }


def have_same_values(first: TensorHeader, second: TensorHeader) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    with first.file.open("rb") as one, second.file.open("rb") as other:
        one.seek(first.offset)
        other.seek(second.offset)
        left = first.num_bytes
        while left:
            size = min(BLOCK_BYTES, left)
            block = one.read(size)
            if len(block) != size:
                raise BrokenCheckpointError(f"{first.file}: ended inside tensor {first.name} while it was read. Fetch it again.")
            if block != other.read(size):
                return False
            left -= size
    return True

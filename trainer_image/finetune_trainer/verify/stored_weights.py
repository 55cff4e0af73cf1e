"""Reads values of a model's parameters, by the model's own names, from the safetensors files of a directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from finetune_trainer.merge.changes import Quantization
from finetune_trainer.merge.inputs import with_adapters_vocabulary
from finetune_trainer.weights.errors import BrokenCheckpointError
from finetune_trainer.weights.headers import CONFIG_FILE, TensorHeader, read_checkpoint, read_json
from finetune_trainer.weights.read_model import read_stored_model
from finetune_trainer.weights.rounding import READ_DTYPES, TORCH_DTYPES
from finetune_trainer.weights.stored import StoredParameter

BLOCK_BYTES = 16 << 20
"""Number of bytes that are read at a time if values are converted."""


class StoredWeights:
    """The weights of a model directory. Raises MergeError if the directory is broken.

    quantized: stored tensors, by name, that were packed in training (merge/quantized_base.py). adapters: directories of
    adapters; if their embeddings have more rows than the files, the additional rows come from the adapters.
    """

    def __init__(
        self, directory: Path, quantized: Mapping[str, Quantization] | None = None, adapters: Sequence[Path] = ()
    ) -> None:
        self._checkpoint = read_checkpoint(directory)
        self._model = read_stored_model(self._checkpoint, read_json(directory / CONFIG_FILE))
        self._model = with_adapters_vocabulary(self._model, adapters)
        self.num_rows = self._model.num_rows
        """Number of rows of the embeddings if they are larger than in the files, or None."""
        self._quantized = quantized or {}
        self.directory = directory

    @property
    def num_bytes(self) -> int:
        """Size of all files together."""
        return sum(self._checkpoint.file_bytes.values())

    def holds(self, path: str) -> bool:
        """Whether the files have a parameter or buffer of the model, under its own name or the name of a tied parameter."""
        return self._model.readable(path) is not None

    def whole(self, path: str, dtype: torch.dtype) -> torch.Tensor:
        """Return all values of a parameter, in the model's shape and rounded to `dtype`. Raises BrokenCheckpointError."""
        parameter = self._parameter(path)
        out = torch.empty(parameter.shape, dtype=dtype)
        for part in parameter.parts:
            target = out[part.place]
            quantization = self._quantized.get(part.header.name)
            if quantization is None and target.is_contiguous():
                self._read(part.header, target.view(-1))
                continue
            values = torch.empty(part.header.shape, dtype=TORCH_DTYPES[part.header.dtype])
            self._read(part.header, values.view(-1))
            target.copy_(values if quantization is None else _unpacked(values, quantization))
        return out

    def _parameter(self, path: str) -> StoredParameter:
        parameter = self._model.readable(path)
        if parameter is None:
            raise BrokenCheckpointError(
                f"{self.directory} holds no parameter {path}, which the model has. Fetch the model again."
            )
        return parameter

    def _read(self, header: TensorHeader, target: torch.Tensor) -> None:
        """Read a stored tensor into the flat `target`, in blocks if their dtypes differ."""
        stored = READ_DTYPES.get(header.dtype)
        # Weights are never integers, but buffers may be, such as tables of experts.
        if stored is None or (target.dtype.is_floating_point and not stored.is_floating_point):
            raise BrokenCheckpointError(
                f"{header.file}: tensor {header.name} is {header.dtype}, which no gate is known for. Give the 16-bit original."
            )
        step = target.numel() if stored is target.dtype else BLOCK_BYTES // stored.itemsize
        with header.file.open("rb", buffering=0) as file:
            file.seek(header.offset)
            for first in range(0, target.numel(), step or 1):
                piece = target[first : first + step]
                block = piece if stored is target.dtype else torch.empty(piece.shape, dtype=stored)
                view = block.view(torch.uint8).numpy().data
                while view:
                    count = file.readinto(view)
                    if not count:
                        raise BrokenCheckpointError(f"{header.file} ended inside tensor {header.name}. Fetch it again.")
                    view = view[count:]
                if block is not piece:
                    piece.copy_(block)


def _unpacked(values: torch.Tensor, quantization: Quantization) -> torch.Tensor:
    # This imports bitsandbytes, so it happens only if a base was quantized.
    from finetune_trainer.merge.steps.quantization import dequantized

    return dequantized(values, quantization)

"""Values of a model's parameters by the model's own names, from the safetensors files of a directory: whole, or some rows.

Memory of large ones returns to the system when they are freed (return_freed_memory).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from finetune_trainer.merge.changes import Quantization
from finetune_trainer.merge.inputs import with_adapters_vocabulary
from finetune_trainer.model.load import lazy_zeros
from finetune_trainer.weights.errors import BrokenCheckpointError
from finetune_trainer.weights.headers import CONFIG_FILE, TensorHeader, read_checkpoint, read_json
from finetune_trainer.weights.read_model import read_stored_model
from finetune_trainer.weights.rounding import READ_DTYPES, TORCH_DTYPES
from finetune_trainer.weights.stored import StoredParameter, StoredPart

BLOCK_BYTES = 16 << 20
"""Bytes that are read at a time if values are converted."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Parameters of mallopt(3)."""
OWN_PAGES_BYTES = 8 << 20
KEPT_BYTES = 16 << 20


class StoredWeights:
    """A model directory's weights. Raises MergeError if it is broken.

    quantized: stored tensors, by name, that stand for the weights of a quantised layer (merge/quantized_base.py). adapters: their
    directories; if these have embeddings of more rows than the files, the further rows are theirs.
    """

    def __init__(
        self, directory: Path, quantized: Mapping[str, Quantization] | None = None, adapters: Sequence[Path] = ()
    ) -> None:
        self._checkpoint = read_checkpoint(directory)
        self._model = read_stored_model(self._checkpoint, read_json(directory / CONFIG_FILE))
        self._model = with_adapters_vocabulary(self._model, adapters)
        self.num_rows = self._model.num_rows
        """Number of rows of the embeddings if they are larger than in the files."""
        self.resized = frozenset(self._model.embeddings if self.num_rows is not None else ())
        """Paths of parameters with as many rows."""
        self._quantized = quantized or {}
        self.directory = directory

    @property
    def num_bytes(self) -> int:
        """Size of all files together."""
        return sum(self._checkpoint.file_bytes.values())

    def holds(self, path: str) -> bool:
        """Whether the files have a parameter or buffer of the model, under its own name or that of one tied to it."""
        return self._model.readable(path) is not None

    def whole(self, path: str, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
        """All values of a parameter in the model's shape, rounded to `dtype`. Raises BrokenCheckpointError.

        out: memory for the values, if it has this shape; otherwise new memory is used.
        """
        parameter = self._parameter(path)
        if out is None or out.shape != parameter.shape:
            out = torch.empty(parameter.shape, dtype=dtype)
        for part in parameter.parts:
            target = out[part.place]
            if part.header.name in self._quantized:
                target.copy_(self._unpacked(part.header))
            elif target.is_contiguous():
                self._read(part.header, 0, target.view(-1))
            else:
                target.copy_(self._values(part.header, 0, part.header.shape[0]))
        return out

    def rows(self, path: str, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows [first, last) of a parameter that is stored as one tensor, or as several consecutive ones."""
        parts = self._parameter(path).parts
        if parts[0].header.name in self._quantized:
            (part,) = parts
            return self._unpacked(part.header)[first:last].to(dtype)
        return self._rows_of(parts, first, last, dtype)

    def some_rows(self, path: str, indices: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        """A parameter of which only the rows `indices` have values and take memory; the others are zero."""
        parameter = self._parameter(path)
        out = lazy_zeros(parameter.shape, dtype)
        for row in sorted(set(indices)):
            if not 0 <= row < parameter.shape[0]:
                raise ValueError(f"token id {row}: {path} has {parameter.shape[0]} rows.")
            out[row].copy_(self._rows_of(parameter.parts, row, row + 1, dtype)[0])
        return out

    def is_one_tensor(self, path: str) -> bool:
        """Whether rows of the parameter can be read separately."""
        parts = self._parameter(path).parts
        return all(part.expert is None and part.header.name not in self._quantized for part in parts)

    def _parameter(self, path: str) -> StoredParameter:
        parameter = self._model.readable(path)
        if parameter is None:
            raise BrokenCheckpointError(
                f"{self.directory}: holds no parameter {path}, which the model has. Fetch the model again."
            )
        return parameter

    def _rows_of(self, parts: Iterable[StoredPart], first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
        blocks = []
        for part in parts:
            begin, end = max(first - part.first_row, 0), min(last - part.first_row, part.header.shape[0])
            if begin < end:
                blocks.append(self._values(part.header, begin, end).to(dtype))
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    def _unpacked(self, header: TensorHeader) -> torch.Tensor:
        from finetune_trainer.merge.steps.quantization import dequantized

        return dequantized(self._values(header, 0, header.shape[0]), self._quantized[header.name])

    def _values(self, header: TensorHeader, first: int, last: int) -> torch.Tensor:
        out = torch.empty((last - first, *header.shape[1:]), dtype=TORCH_DTYPES[header.dtype])
        self._read(header, first * (out[0].numel() if len(out) else 0), out.view(-1))
        return out

    def _read(self, header: TensorHeader, start: int, target: torch.Tensor) -> None:
        """Read elements [start, start + len(target)) of a stored tensor into one dimension, in blocks if its dtype differs."""
        stored = READ_DTYPES.get(header.dtype)
        # Weights are no integers, but buffers may be, such as tables of experts.
        if stored is None or (target.dtype.is_floating_point and not stored.is_floating_point):
            raise BrokenCheckpointError(
                f"{header.file}: tensor {header.name} is {header.dtype}, which no gate is known for. Give the 16-bit original."
            )
        step = target.numel() if stored is target.dtype else BLOCK_BYTES // stored.itemsize
        with header.file.open("rb", buffering=0) as file:
            file.seek(header.offset + start * stored.itemsize)
            for first in range(0, target.numel(), step or 1):
                piece = target[first : first + step]
                block = piece if stored is target.dtype else torch.empty(piece.shape, dtype=stored)
                view = block.view(torch.uint8).numpy().data
                while view:
                    count = file.readinto(view)
                    if not count:
                        raise BrokenCheckpointError(f"{header.file}: ended inside tensor {header.name}. Fetch it again.")
                    view = view[count:]
                if block is not piece:
                    piece.copy_(block)


def return_freed_memory() -> None:
    """Have this process return freed memory to the system, except for what activations need again and again.

    Blocks from OWN_PAGES_BYTES on are mapped separately. Smaller ones come from one heap for all threads, of which up to
    KEPT_BYTES stay free at its end: with new pages for every activation, verification took half as long again. No effect without
    mallopt.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, OWN_PAGES_BYTES), (M_TRIM_THRESHOLD, KEPT_BYTES)):
            mallopt(parameter, value)

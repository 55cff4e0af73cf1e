"""Computes rows of one merged matrix in fp64, and the error that rounding explains. Shares no arithmetic with the merge.

The formulas are PEFT's as documented: W + scaling * B@A, DoRA's m * (W + scaling * B@A) / ||W + scaling * B@A||, sums and
replaced rows. Changes that only PEFT's own layers can merge (ModuleMerge) have no formula here; only the comparison of logits
covers such tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from finetune_trainer.merge.changes import Addition, Change, LowRank, ModuleMerge, Orientation, Quantization, TokenRows
from finetune_trainer.verify.gate import UNIT_ROUNDOFF
from finetune_trainer.weights.errors import BrokenCheckpointError
from finetune_trainer.weights.headers import TensorHeader
from finetune_trainer.weights.rounding import TORCH_DTYPES

_FP32 = UNIT_ROUNDOFF["float32"]
_NORM_ROWS = 512
"""Number of rows that are computed at a time for norms over all rows."""
_Values = tuple[torch.Tensor, torch.Tensor]
"""Exact values and allowed errors, both of shape (rows, columns) in fp64."""


def has_formula(changes: Sequence[Change]) -> bool:
    """Whether ExactMatrix can compute these changes."""
    return not any(isinstance(change, ModuleMerge) for change in changes)


class ExactMatrix:
    """Matrix `index` of a tensor after `changes` are applied. `shape` is the shape of each matrix of the tensor."""

    def __init__(
        self,
        source: TensorHeader,
        index: int,
        shape: tuple[int, int],
        changes: Sequence[Change],
        *,
        held: torch.dtype,
        out: torch.dtype,
    ) -> None:
        """held: the dtype of the weight between two changes. out: the dtype of the merged tensor."""
        self._source, self._index, self._shape, self._changes = source, index, shape, tuple(changes)
        self._held, self._out = held, out
        self._held_roundoff = torch.finfo(held).eps / 2
        # Distance between subnormal float16 numbers. In other dtypes this distance is too small to matter.
        self._floor = 2.0**-24 if torch.float16 in (held, out) or source.dtype == "F16" else 1e-37
        self._norms: dict[int, torch.Tensor] = {}
        self._unpacked: torch.Tensor | None = None

    def rows(self, chosen: Sequence[int]) -> _Values:
        """Return values and allowed errors of the chosen rows of the finished matrix."""
        values, errors = self._after(len(self._changes), chosen)
        if self._out is not self._held:
            errors = errors + torch.finfo(self._out).eps / 2 * 1.01 * values.abs()
        return values, errors + self._floor

    def _after(self, count: int, chosen: Sequence[int]) -> _Values:
        if count == 0:
            values = read_rows(self._source, self._index, self._shape, chosen).to(self._held).double()
            return values, torch.zeros_like(values)
        change = self._changes[count - 1]
        if isinstance(change, Quantization):
            if self._unpacked is None:
                # This imports bitsandbytes, so it happens only if a base was quantized.
                from finetune_trainer.merge.steps.quantization import dequantized

                whole = read_rows(self._source, self._index, self._shape, range(self._shape[0]))
                self._unpacked = dequantized(whole, change)
            values = self._unpacked[list(chosen)].to(self._held).double()
            return values, self._held_roundoff * 1.01 * values.abs()
        values, errors = self._after(count - 1, chosen)
        match change:
            case LowRank():
                values, errors = self._low_rank(change, count, chosen, values, errors)
            case Addition():
                added = change.scaling * _load(change.tensor).view(self._shape)[list(chosen)].double()
                errors = errors + 2 * _FP32 * (values.abs() + added.abs())
                values = values + added
            case TokenRows():
                rows = _load(change.tensor).to(self._held).double().view(len(change.indices), -1)
                places = {index: number for number, index in enumerate(change.indices)}
                for number, row in enumerate(chosen):
                    if row in places:
                        values[number], errors[number] = rows[places[row]], 0.0
            case _:
                pass
        return values, errors + self._held_roundoff * 1.01 * values.abs()

    def _low_rank(
        self, change: LowRank, count: int, chosen: Sequence[int], values: torch.Tensor, errors: torch.Tensor
    ) -> _Values:
        summed, summed_errors = self._sum(change, chosen, values, errors)
        if change.magnitude is None:
            return summed, summed_errors
        magnitude = _load(change.magnitude).double().view(-1)
        if change.orientation is Orientation.LINEAR:
            norms = summed.norm(dim=1, keepdim=True)
            factor, num_terms = magnitude[list(chosen)].unsqueeze(1) / norms, summed.shape[1]
            inherited = summed_errors.norm(dim=1, keepdim=True) / norms
        else:
            if count not in self._norms:
                squares = torch.zeros(self._shape[1], dtype=torch.float64)
                for first in range(0, self._shape[0], _NORM_ROWS):
                    block = range(first, min(first + _NORM_ROWS, self._shape[0]))
                    squares += (self._sum(change, block, *self._after(count - 1, block))[0] ** 2).sum(dim=0)
                self._norms[count] = squares.sqrt()
            factor, num_terms = (magnitude / self._norms[count]).unsqueeze(0), self._shape[0]
            inherited = torch.tensor(0.0 if count == 1 else self._held_roundoff, dtype=torch.float64)
        result = summed * factor
        return result, summed_errors * factor.abs() + ((16 + num_terms / 64) * _FP32 + inherited) * result.abs()

    def _sum(self, change: LowRank, chosen: Sequence[int], values: torch.Tensor, errors: torch.Tensor) -> _Values:
        """Compute W + scaling * B@A. PEFT rounds to fp32 in a sum of r products, in the scaling and in the addition."""
        left, right = self._factors(change, list(chosen))
        delta = change.scaling * (left @ right)
        rank = left.shape[1]
        error = (rank + 2) * _FP32 * abs(change.scaling) * (left.abs() @ right.abs())
        if change.magnitude is None and (change.orientation is Orientation.EMBEDDING or change.part is not None):
            error = error + self._held_roundoff * delta.abs()  # PEFT rounds the product separately
        return values + delta, errors + error + 2 * _FP32 * (values.abs() + delta.abs())

    def _factors(self, change: LowRank, chosen: list[int]) -> _Values:
        """Return factors (rows, r) and (r, columns), whose product is oriented like the `chosen` rows of the stored matrix."""
        a, b = _load(change.a), _load(change.b)
        a, b = a.reshape(a.shape[0], -1), b.reshape(b.shape[0], -1)
        part = change.part
        first_row = 0
        if part is not None:
            rank = a.shape[0] // part.num_experts
            a, b = a[part.expert * rank : (part.expert + 1) * rank], b[:, part.expert :: part.num_experts]
            first_row = part.first_row
        rows = [first_row + row for row in chosen]
        columns = slice(self._shape[1])
        if change.orientation is Orientation.LINEAR:
            return b[rows].double(), a[:, columns].double()
        return a[:, rows].T.double(), b[columns].T.double()


def read_rows(tensor: TensorHeader, index: int, shape: tuple[int, int], chosen: Sequence[int]) -> torch.Tensor:
    """Read the `chosen` rows of matrix `index` of a stored tensor, in the tensor's dtype. Raises BrokenCheckpointError."""
    dtype = TORCH_DTYPES[tensor.dtype]
    row_bytes = shape[1] * dtype.itemsize
    start = tensor.offset + index * shape[0] * row_bytes
    out = torch.empty(len(chosen), shape[1], dtype=dtype)
    view = out.view(-1).view(torch.uint8).numpy().data
    with tensor.file.open("rb") as file:
        for number, row in enumerate(chosen):
            file.seek(start + row * row_bytes)
            if file.readinto(view[number * row_bytes : (number + 1) * row_bytes]) != row_bytes:
                raise BrokenCheckpointError(f"{tensor.file} ended inside tensor {tensor.name}. Fetch it again.")
    return out


@lru_cache(maxsize=8)
def _load(tensor: TensorHeader) -> torch.Tensor:
    """Load an adapter's tensor, and keep it for the next few matrices, because all experts of a layer share their factors."""
    return read_rows(tensor, 0, (1, tensor.num_bytes // TORCH_DTYPES[tensor.dtype].itemsize), [0]).view(tensor.shape)


def is_zero(tensor: TensorHeader) -> bool:
    """Whether all values are zero."""
    return not bool(_load(tensor).any())


def clear_adapter_cache() -> None:
    """Drop the cached tensors, since their files may change."""
    _load.cache_clear()

"""W + scaling * B@A, with PEFT's bits: what peft 0.21.2 does on a CPU, cut into blocks of rows.

PEFT widens the factors to fp32, multiplies them whole, scales the product, adds it to the weight (which promotes 16-bit values to
fp32) and rounds once. DoRA divides by the norms of the sum and rounds once as well. Embeddings and expert parameters round twice:
the product to the weight's dtype and then the sum (sources: peft tuners/lora/layer.py `merge`, `get_delta_weight`; variants.py
`Dora...Variant.merge_unsafe`). Elementwise work may be cut anywhere. A matrix product may not: its bits depend on the kernel that
the library picks for its shape. So products are cut into blocks only where `blocks_are_exact` has seen equal bits on this machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from finetune_trainer.merge.changes import Orientation
from finetune_trainer.merge.steps.step import Scratch
from finetune_trainer.weights.rounding import all_finite, round_into

BLOCK_ROWS = 256
"""Rows of one matrix product. Measured: blocks of 64 rows and more had PEFT's bits, of 1 and 7 rows had not."""
MIN_BLOCK_ROWS = 64
BLOCK_BYTES = 8 << 20
"""Wider weights than 8,192 columns get fewer rows per block, so that an fp32 block stays near this."""
SELF_CHECK_BYTES = 32 << 20
"""The whole product that blocks are compared with is cut to this many fp32 bytes, because memory is bounded."""

_exact_shapes: dict[tuple[object, ...], bool] = {}
"""What the self-check has seen in this process, by the shapes that decide which kernels the library picks."""


@dataclass(frozen=True)
class Factors:
    """An adapter on one weight, in fp32. a: (r, in), b: (out, r), magnitude: (out,) or None."""

    a: torch.Tensor
    b: torch.Tensor
    magnitude: torch.Tensor | None
    scaling: float
    orientation: Orientation
    rounds_product: bool
    """Whether B@A is rounded to the weight's dtype before it is added, as for embeddings and expert parameters."""

    @property
    def is_transposed(self) -> bool:
        """True when the weight is stored as (in, out): its rows are then columns of B@A."""
        return self.orientation is not Orientation.LINEAR


@dataclass(frozen=True)
class LowRankStep:
    """LoRA, rsLoRA or DoRA on one matrix."""

    factors: Factors
    compute: torch.dtype

    @property
    def _needs_whole(self) -> bool:
        """DoRA's norms run across the stored rows where the weight is transposed, so that no row can be finished alone."""
        return self.factors.magnitude is not None and self.factors.is_transposed

    def row_blocks(self, num_rows: int, num_columns: int) -> list[tuple[int, int]]:
        """Blocks of one matrix product each; all rows where blocks would not have the whole product's bits."""
        factors = self.factors
        if self._needs_whole:
            return [(0, num_rows)]
        key = (factors.orientation, factors.a.shape, factors.a.stride(), factors.b.shape, factors.b.stride())
        if key not in _exact_shapes:
            _exact_shapes[key] = blocks_are_exact(factors)
        return row_blocks(num_rows, num_columns) if _exact_shapes[key] else [(0, num_rows)]

    def apply(self, values: torch.Tensor, rows: tuple[int, int], out: torch.Tensor, scratch: Scratch) -> bool:
        if self._needs_whole:
            _merge_whole_transposed_dora(values, self.factors, self.compute, out)
            return all_finite(out)
        return _merge_block(values, self.factors, rows, compute=self.compute, out=out, scratch=scratch)


def row_blocks(num_rows: int, num_columns: int) -> list[tuple[int, int]]:
    """Cuts rows into blocks for matrix products; the last takes up the remainder, since small blocks differ in bits."""
    rows = min(BLOCK_ROWS, max(MIN_BLOCK_ROWS, BLOCK_BYTES // (4 * max(num_columns, 1)) // 8 * 8))
    starts = list(range(0, max(num_rows - rows, 0) + 1, rows))
    return [(start, stop) for start, stop in zip(starts, [*starts[1:], num_rows], strict=True)]


def product(factors: Factors, start: int, stop: int, scratch: Scratch | None = None) -> torch.Tensor:
    """Rows start..stop of B@A as the weight is stored, unscaled, fp32 (rows, columns)."""
    first, second = (factors.b, factors.a[:, start:stop]) if factors.is_transposed else (factors.b[start:stop], factors.a)
    out = None if scratch is None else scratch.block(0, first.shape[0], second.shape[1])
    result = torch.mm(first, second, out=out)
    return result.T if factors.is_transposed else result


def blocks_are_exact(factors: Factors) -> bool:
    """Compares blocks with one product over as many rows as SELF_CHECK_BYTES allow, the first and the last ones.

    True for a weight that fits whole only if every bit of the whole product is equal. Called once per shape, since the
    library picks its kernels by shape.
    """
    num_rows = factors.a.shape[1] if factors.is_transposed else factors.b.shape[0]
    num_columns = factors.b.shape[0] if factors.is_transposed else factors.a.shape[1]
    blocks = row_blocks(num_rows, num_columns)
    if len(blocks) == 1:
        return True
    allowed = max(2, SELF_CHECK_BYTES // (4 * num_columns * BLOCK_ROWS))
    for group in [blocks] if len(blocks) <= allowed else [blocks[:allowed], blocks[-allowed:]]:
        first, last = group[0][0], group[-1][1]
        whole = product(factors, first, last)
        for start, stop in group:
            if not torch.equal(whole[start - first : stop - first], product(factors, start, stop)):
                return False
    return True


def _merge_block(
    base: torch.Tensor,
    factors: Factors,
    rows: tuple[int, int],
    *,
    compute: torch.dtype,
    out: torch.Tensor,
    scratch: Scratch,
) -> bool:
    """Writes merged rows into `out`; returns whether all of them are finite.

    rows: first and last + 1 within the weight. base: (rows, columns), those rows as stored, in their own dtype.
    compute: the dtype PEFT would hold the weight in. out: (rows, columns) in the output dtype.
    """
    start, stop = rows
    delta = product(factors, start, stop, scratch).mul_(factors.scaling)
    if factors.rounds_product and factors.magnitude is None:
        rounded = base.to(compute, copy=True)
        rounded += delta.to(compute)
        out.copy_(rounded)
        return all_finite(out)
    if torch.promote_types(compute, torch.float32) == torch.float32:
        weight = scratch.block(1, *base.shape).copy_(base if base.dtype == compute else base.to(compute))
        weight = delta.add_(weight)
    else:
        weight = base.to(compute) + delta
    if factors.magnitude is not None:
        norm = torch.linalg.norm(weight, dim=1)
        weight.mul_((factors.magnitude[start:stop] / norm).view(-1, 1))
    round_into(weight, compute, out)
    # Of the output dtypes only float16 can overflow where the fp32 sum did not; elsewhere the sum, still in the
    # processor's cache, is cheaper to look at.
    return all_finite(out if torch.float16 in (compute, out.dtype) else weight)


def _merge_whole_transposed_dora(base: torch.Tensor, factors: Factors, compute: torch.dtype, out: torch.Tensor) -> None:
    """DoRA on a weight stored as (in, out): Conv1D, embeddings. Shapes and dtypes as in `_merge_block`, all rows.

    Follows PEFT operation by operation, memory layouts included: the order in which a norm adds up its terms depends on
    the strides of the sum, and those on the order of the operands.
    """
    if factors.magnitude is None:
        raise ValueError("factors without a magnitude are no DoRA adapter")
    weight = base.to(compute)
    delta = (factors.b @ factors.a).T * factors.scaling
    norm = torch.linalg.norm(weight.T + 1 * delta.T, dim=1)
    merged = (factors.magnitude / norm).view(1, -1) * (weight + delta)
    round_into(merged, compute, out)

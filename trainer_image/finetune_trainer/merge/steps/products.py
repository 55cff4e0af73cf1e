"""B@A of an adapter in blocks of rows, and a check that this machine's matrix library gives them PEFT's bits.

A matrix product's bits depend on the kernel that the library picks for its shape. So a product is cut into blocks, transposed or
added to the weight while it is computed only if that was seen to give equal bits on this machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from finetune_trainer.merge.changes import Orientation
from finetune_trainer.merge.steps.step import Scratch

BLOCK_ROWS = 256
"""Rows of one matrix product. Measured: blocks of 64 rows and more had PEFT's bits, blocks of 1 and 7 rows had not."""
MIN_BLOCK_ROWS = 64
BLOCK_BYTES = 8 << 20
"""Weights with more than 8,192 columns get fewer rows per block, so that an fp32 block stays near this size."""
SELF_CHECK_BYTES = 32 << 20
"""fp32 bytes to which the whole product is cut with which blocks are compared; it bounds memory."""


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
    def kernel_key(self) -> tuple[object, ...]:
        """Properties that decide which kernels the matrix library picks."""
        return (self.orientation, self.a.shape, self.a.stride(), self.b.shape, self.b.stride())

    @property
    def is_transposed(self) -> bool:
        """Whether the weight is stored as (in, out): its rows are then columns of B@A."""
        return self.orientation is not Orientation.LINEAR


Product = Callable[..., torch.Tensor]
"""Type of `product` and `turned_product`."""


def row_blocks(num_rows: int, num_columns: int) -> list[tuple[int, int]]:
    """Cut rows into blocks for matrix products; the last takes up the remainder, since small blocks differ in bits."""
    rows = min(BLOCK_ROWS, max(MIN_BLOCK_ROWS, BLOCK_BYTES // (4 * max(num_columns, 1)) // 8 * 8))
    starts = list(range(0, max(num_rows - rows, 0) + 1, rows))
    return [(start, stop) for start, stop in zip(starts, [*starts[1:], num_rows], strict=True)]


def product(factors: Factors, start: int, stop: int, scratch: Scratch | None = None) -> torch.Tensor:
    """Rows start..stop of B@A as the weight is stored, unscaled, fp32 (rows, columns), as PEFT computes them."""
    first, second = (factors.b, factors.a[:, start:stop]) if factors.is_transposed else (factors.b[start:stop], factors.a)
    out = None if scratch is None else scratch.block(0, first.shape[0], second.shape[1])
    result = torch.mm(first, second, out=out)
    return result.T if factors.is_transposed else result


def turned_product(factors: Factors, start: int, stop: int, scratch: Scratch | None = None) -> torch.Tensor:
    """The product for a weight stored as (in, out), as A.T@B.T: row after row in memory, like the weight.

    Adding to the weight column by column would take three times as long as all of the merge's other arithmetic.
    """
    first, second = factors.a[:, start:stop].T, factors.b.T
    return torch.mm(first, second, out=None if scratch is None else scratch.block(0, first.shape[0], second.shape[1]))


def add_product(factors: Factors, start: int, stop: int, weight: torch.Tensor) -> None:
    """Add scaling * (rows start..stop of B@A) to those rows of the weight as it is stored, fp32."""
    if factors.is_transposed:
        weight.addmm_(factors.a[:, start:stop].T, factors.b.T, alpha=factors.scaling)
    else:
        weight.addmm_(factors.b[start:stop], factors.a, alpha=factors.scaling)


def is_exact_factor(scaling: float) -> bool:
    """Whether a product with `scaling` has the same digits, as with a power of two of at least 1, which most scalings are.

    Only if the product overflows, and PEFT's sum is infinite, the sum in one pass may still be a number.
    """
    return scaling >= 1 and math.frexp(scaling)[0] == 0.5


def probe_of(factors: Factors) -> Factors:
    """Factors with the same memory layout and other values: an adapter's own may be zeros, which any kernel adds alike."""
    return replace(factors, a=_spread_like(factors.a), b=_spread_like(factors.b))


def _spread_like(tensor: torch.Tensor) -> torch.Tensor:
    """Different values from -0.5 to 0.5 without an order, by multiples of the golden ratio."""
    values = (torch.arange(1, tensor.numel() + 1, dtype=torch.float64) * 0.6180339887498949) % 1 - 0.5
    return torch.empty_strided(tensor.shape, tensor.stride()).copy_(values.view(tensor.shape))


def blocks_are_exact(factors: Factors, of_block: Product) -> bool:
    """Compare the first and last blocks with one product over as many rows as SELF_CHECK_BYTES allow.

    For a weight that fits whole, the result is True only if every bit of the whole product is equal. Called once per shape, since
    the library picks its kernels by shape.
    """
    groups = _compared_blocks(factors)
    if groups == [groups[0][:1]] and of_block is product:
        return True
    for group in groups:
        first, last = group[0][0], group[-1][1]
        whole = product(factors, first, last)
        for start, stop in group:
            if not torch.equal(whole[start - first : stop - first], of_block(factors, start, stop)):
                return False
    return True


def sums_are_exact(factors: Factors) -> bool:
    """Whether `add_product` gives the bits of a separate product and addition, in all compared blocks."""
    exact = turned_product if factors.is_transposed else product
    for group in _compared_blocks(factors):
        for start, stop in group:
            delta = exact(factors, start, stop)
            weight = delta.flip(0).div_(3)
            expected = torch.add(weight, delta, alpha=factors.scaling)
            add_product(factors, start, stop, weight)
            if not torch.equal(weight, expected):
                return False
    return True


def _compared_blocks(factors: Factors) -> list[list[tuple[int, int]]]:
    """Groups of neighbouring blocks, the first and the last ones, as many as SELF_CHECK_BYTES allow."""
    num_rows = factors.a.shape[1] if factors.is_transposed else factors.b.shape[0]
    num_columns = factors.b.shape[0] if factors.is_transposed else factors.a.shape[1]
    blocks = row_blocks(num_rows, num_columns)
    allowed = max(2, SELF_CHECK_BYTES // (4 * num_columns * BLOCK_ROWS))
    return [blocks] if len(blocks) <= allowed else [blocks[:allowed], blocks[-allowed:]]

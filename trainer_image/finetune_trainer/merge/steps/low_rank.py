"""W + scaling * B@A, with PEFT's bits: what peft 0.21.2 does on a CPU, cut into blocks of rows, for a weight or for one expert.

A matrix product's bits depend on the kernel that the library picks for its shape, so products are cut into blocks, and experts
multiplied one by one, only where this machine was seen to give equal bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from finetune_trainer.merge.changes import Orientation
from finetune_trainer.merge.steps.step import Scratch
from finetune_trainer.weights.errors import MergeError
from finetune_trainer.weights.rounding import all_finite, round_into
from finetune_trainer.weights.stored import ExpertPart

BLOCK_ROWS = 256
"""Rows of one matrix product. Measured: blocks of 64 rows and more had PEFT's bits, of 1 and 7 rows had not."""
MIN_BLOCK_ROWS = 64
BLOCK_BYTES = 8 << 20
"""Wider weights than 8,192 columns get fewer rows per block, so that an fp32 block stays near this."""
SELF_CHECK_BYTES = 32 << 20
"""The whole product that blocks are compared with is cut to this many fp32 bytes, because memory is bounded."""
EXPERT_CHECK_BYTES = 32 << 20
"""fp32 bytes of the batch that single products are compared with, because memory is bounded."""

_exact_products: dict[tuple[object, ...], Product | None] = {}
"""What the self-check has seen in this process, by the shapes that decide which kernels the library picks."""
_equal_experts: set[tuple[int, ...]] = set()
"""Shapes (experts, rank, in, out) whose single products were found equal in this process."""


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


Product = Callable[..., torch.Tensor]
"""`product` or `turned_product`."""


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
        if self._needs_whole or self._exact_product() is None:
            return [(0, num_rows)]
        return row_blocks(num_rows, num_columns)

    def _exact_product(self) -> Product | None:
        """The fastest product whose blocks have the bits of PEFT's; None: no block has."""
        factors = self.factors
        key = (factors.orientation, factors.a.shape, factors.a.stride(), factors.b.shape, factors.b.stride())
        if key not in _exact_products:
            products = (turned_product, product) if factors.is_transposed else (product,)
            _exact_products[key] = next((each for each in products if blocks_are_exact(factors, each)), None)
        return _exact_products[key]

    def apply(self, values: torch.Tensor, rows: tuple[int, int], out: torch.Tensor, scratch: Scratch) -> bool:
        if self._needs_whole:
            _merge_whole_transposed_dora(values, self.factors, self.compute, out)
            return all_finite(out)
        delta = (self._exact_product() or product)(self.factors, *rows, scratch)
        return _merge_block(values, delta, self.factors, rows, compute=self.compute, out=out, scratch=scratch)


def row_blocks(num_rows: int, num_columns: int) -> list[tuple[int, int]]:
    """Cuts rows into blocks for matrix products; the last takes up the remainder, since small blocks differ in bits."""
    rows = min(BLOCK_ROWS, max(MIN_BLOCK_ROWS, BLOCK_BYTES // (4 * max(num_columns, 1)) // 8 * 8))
    starts = list(range(0, max(num_rows - rows, 0) + 1, rows))
    return [(start, stop) for start, stop in zip(starts, [*starts[1:], num_rows], strict=True)]


def product(factors: Factors, start: int, stop: int, scratch: Scratch | None = None) -> torch.Tensor:
    """Rows start..stop of B@A as the weight is stored, unscaled, fp32 (rows, columns). As PEFT computes it."""
    first, second = (factors.b, factors.a[:, start:stop]) if factors.is_transposed else (factors.b[start:stop], factors.a)
    out = None if scratch is None else scratch.block(0, first.shape[0], second.shape[1])
    result = torch.mm(first, second, out=out)
    return result.T if factors.is_transposed else result


def turned_product(factors: Factors, start: int, stop: int, scratch: Scratch | None = None) -> torch.Tensor:
    """The same where the weight is stored as (in, out), as A.T@B.T: row after row in memory, as the weight is.

    What is added to the weight column by column takes three times as long as all of the merge's other arithmetic.
    """
    first, second = factors.a[:, start:stop].T, factors.b.T
    return torch.mm(first, second, out=None if scratch is None else scratch.block(0, first.shape[0], second.shape[1]))


def blocks_are_exact(factors: Factors, of_block: Product) -> bool:
    """Compares blocks with one product over as many rows as SELF_CHECK_BYTES allow, the first and the last ones.

    True for a weight that fits whole only if every bit of the whole product is equal. Called once per shape, since the
    library picks its kernels by shape.
    """
    num_rows = factors.a.shape[1] if factors.is_transposed else factors.b.shape[0]
    num_columns = factors.b.shape[0] if factors.is_transposed else factors.a.shape[1]
    blocks = row_blocks(num_rows, num_columns)
    if len(blocks) == 1 and of_block is product:
        return True
    allowed = max(2, SELF_CHECK_BYTES // (4 * num_columns * BLOCK_ROWS))
    for group in [blocks] if len(blocks) <= allowed else [blocks[:allowed], blocks[-allowed:]]:
        first, last = group[0][0], group[-1][1]
        whole = product(factors, first, last)
        for start, stop in group:
            if not torch.equal(whole[start - first : stop - first], of_block(factors, start, stop)):
                return False
    return True


def _merge_block(
    base: torch.Tensor,
    delta: torch.Tensor,
    factors: Factors,
    rows: tuple[int, int],
    *,
    compute: torch.dtype,
    out: torch.Tensor,
    scratch: Scratch,
) -> bool:
    """Writes merged rows into `out`; returns whether all of them are finite.

    rows: first and last + 1 within the weight. base: (rows, columns), those rows as stored, in their own dtype. delta: those
    of B@A, unscaled; used up. compute: the dtype PEFT would hold the weight in. out: (rows, columns) in the output dtype.
    """
    start, stop = rows
    scaling = factors.scaling
    rounds_product = factors.rounds_product and factors.magnitude is None
    if rounds_product or not (scaling >= 1 and math.frexp(scaling)[0] == 0.5):
        delta.mul_(scaling)
        scaling = 1.0
    # A power of two, as most scalings are, rounds nothing: multiplied while adding, the sum has the same bits in a pass less.
    # Only where the product overflows, and PEFT's sum is infinite, this one may still be a number.
    if rounds_product:
        rounded = base.to(compute, copy=True)
        rounded += delta.to(compute)
        out.copy_(rounded)
        return all_finite(out)
    weight = base if base.dtype == compute else base.to(compute)
    if compute == out.dtype == torch.float32 and factors.magnitude is None:
        return all_finite(torch.add(weight, delta, alpha=scaling, out=out))
    if torch.promote_types(compute, torch.float32) == torch.float32:
        weight = torch.add(scratch.block(1, *base.shape).copy_(weight), delta, alpha=scaling, out=delta)
    else:
        weight = torch.add(weight, delta, alpha=scaling)
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
        raise ValueError("factors without a magnitude are not a DoRA adapter")
    weight = base.to(compute)
    delta = (factors.b @ factors.a).T * factors.scaling
    norm = torch.linalg.norm(weight.T + 1 * delta.T, dim=1)
    merged = (factors.magnitude / norm).view(1, -1) * (weight + delta)
    round_into(merged, compute, out)


def part_of_factors(
    a: torch.Tensor, b: torch.Tensor, part: ExpertPart, orientation: Orientation, shape: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """a: (experts * r, in), b: (out, r * experts) -> (r, in') and (out', r) of a stored matrix of `shape`, in their dtype.

    in' and out' are the matrix's columns and rows, or rows and columns where it is stored as (in, out). Raises MergeError if
    this machine would not give PEFT's bits.
    """
    if part.num_experts > 1:
        require_equal_products(a, b, part.num_experts)
    rank = a.shape[0] // part.num_experts
    a = a[part.expert * rank : (part.expert + 1) * rank]
    b = b[:, part.expert :: part.num_experts]
    rows, columns = slice(part.first_row, part.first_row + shape[0]), slice(shape[1])
    outs, ins = (rows, columns) if orientation is Orientation.LINEAR else (columns, rows)
    a, b = a[:, ins], b[outs]
    if part.zeros_before or part.zeros_after:
        # The zeros take part in the product, as in PEFT's, so that its kernel sees the same rank.
        before, after = part.zeros_before, part.zeros_after
        a = torch.cat([a.new_zeros(before, a.shape[1]), a, a.new_zeros(after, a.shape[1])])
        b = torch.cat([b.new_zeros(b.shape[0], before), b, b.new_zeros(b.shape[0], after)], dim=1)
    return a.contiguous(), b.contiguous()


def require_equal_products(a: torch.Tensor, b: torch.Tensor, num_experts: int) -> None:
    """Compare products of single experts with PEFT's one product over as many as EXPERT_CHECK_BYTES allow. Raises MergeError."""
    rank, num_in, num_out = a.shape[0] // num_experts, a.shape[1], b.shape[0]
    shape = (num_experts, rank, num_in, num_out)
    if shape in _equal_experts:
        return
    a, b = a.float(), b.float()
    stacked_a, stacked_b = a.reshape(num_experts, rank, num_in), b.reshape(num_out, rank, num_experts)
    num_checked = min(num_experts, max(2, EXPERT_CHECK_BYTES // (4 * num_in * num_out)))
    whole = torch.einsum("ore,eri->eoi", stacked_b[:, :, :num_checked], stacked_a[:num_checked])
    for expert in range(num_checked):
        if not torch.equal(whole[expert], stacked_b[:, :, expert].contiguous() @ stacked_a[expert]):
            raise MergeError(
                f"adapter factors of {num_experts} experts, rank {rank}, {num_in} to {num_out} features: this machine's matrix "
                "library multiplies experts one by one with other bits than together, so the merge would differ from PEFT's. "
                "Merge on a machine with another processor type."
            )
    _equal_experts.add(shape)

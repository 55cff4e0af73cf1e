"""W + scaling * B@A with PEFT's bits, as peft 0.21.2 computes it on a CPU, in blocks of rows, for a weight or for one expert.

Experts are multiplied one by one only if this machine was seen to give equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from finetune_trainer.merge.changes import Orientation
from finetune_trainer.merge.steps.products import (
    Factors,
    Product,
    add_product,
    blocks_are_exact,
    is_exact_factor,
    probe_of,
    product,
    row_blocks,
    sums_are_exact,
    turned_product,
)
from finetune_trainer.merge.steps.step import Scratch
from finetune_trainer.weights.errors import MergeError
from finetune_trainer.weights.rounding import all_finite, round_into
from finetune_trainer.weights.stored import ExpertPart

EXPERT_CHECK_BYTES = 32 << 20
"""fp32 bytes of the batch with which single products are compared; it bounds memory."""

_exact_products: dict[tuple[object, ...], Product | None] = {}
"""Results of the self-check in this process, by the shapes that decide which kernels the library picks."""
_exact_sums: dict[tuple[object, ...], bool] = {}
"""Results of the self-check of products that the library adds to the weight itself."""
_equal_experts: set[tuple[int, ...]] = set()
"""Shapes (experts, rank, in, out) whose single products had equal bits in this process."""


@dataclass(frozen=True)
class LowRankStep:
    """LoRA, rsLoRA or DoRA on one matrix."""

    factors: Factors
    compute: torch.dtype

    @property
    def _needs_whole(self) -> bool:
        """DoRA's norms run across the stored rows if the weight is transposed, so that no row can be finished alone."""
        return self.factors.magnitude is not None and self.factors.is_transposed

    def row_blocks(self, num_rows: int, num_columns: int) -> list[tuple[int, int]]:
        """Blocks of one matrix product each; one block of all rows if smaller ones would not have the whole product's bits."""
        if self._needs_whole or self._exact_product() is None:
            return [(0, num_rows)]
        # Checked now, in the thread that makes chunks: workers would compare the same blocks at once, each in its own memory.
        self._adds_in_place()
        return row_blocks(num_rows, num_columns)

    def _exact_product(self) -> Product | None:
        """The fastest product whose blocks have the bits of PEFT's, or None if no product's have."""
        key = self.factors.kernel_key
        if key not in _exact_products:
            products = (turned_product, product) if self.factors.is_transposed else (product,)
            probe = probe_of(self.factors)
            _exact_products[key] = next((candidate for candidate in products if blocks_are_exact(probe, candidate)), None)
        return _exact_products[key]

    def _adds_in_place(self) -> bool:
        """Whether the library may add the product to the weight while it multiplies, which saves a pass over both."""
        factors = self.factors
        is_plain = factors.magnitude is None and not factors.rounds_product and is_exact_factor(factors.scaling)
        if not is_plain or torch.promote_types(self.compute, torch.float32) != torch.float32:
            return False
        if self._exact_product() is not (turned_product if factors.is_transposed else product):
            return False
        key = (*factors.kernel_key, factors.scaling)
        if key not in _exact_sums:
            _exact_sums[key] = sums_are_exact(probe_of(factors))
        return _exact_sums[key]

    def apply(self, values: torch.Tensor, rows: tuple[int, int], out: torch.Tensor, scratch: Scratch) -> bool:
        if self._needs_whole:
            _merge_whole_transposed_dora(values, self.factors, self.compute, out)
            return all_finite(out)
        if self._adds_in_place():
            return self._add_in_place(values, rows, out, scratch)
        delta = (self._exact_product() or product)(self.factors, *rows, scratch)
        return _merge_block(values, delta, self.factors, rows, compute=self.compute, out=out, scratch=scratch)

    def _add_in_place(self, values: torch.Tensor, rows: tuple[int, int], out: torch.Tensor, scratch: Scratch) -> bool:
        weight = out if self.compute == out.dtype == torch.float32 else scratch.block(1, *values.shape)
        weight.copy_(values if values.dtype == self.compute else values.to(self.compute))
        add_product(self.factors, *rows, weight)
        if weight is not out:
            round_into(weight, self.compute, out)
        return _sum_is_finite(weight, self.compute, out)


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
    """Write merged rows into `out`; returns whether all of them are finite.

    rows: first and last + 1 within the weight. base: (rows, columns), those rows as stored, in their own dtype. delta: the rows
    of B@A, unscaled; overwritten. compute: the dtype in which PEFT would hold the weight. out: (rows, columns) in the output
    dtype.
    """
    start, stop = rows
    scaling = factors.scaling
    rounds_product = factors.rounds_product and factors.magnitude is None
    if rounds_product or not is_exact_factor(scaling):
        delta.mul_(scaling)
        scaling = 1.0
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
    return _sum_is_finite(weight, compute, out)


def _sum_is_finite(weight: torch.Tensor, compute: torch.dtype, out: torch.Tensor) -> bool:
    # Of the output dtypes only float16 can overflow if the fp32 sum did not; for the others it is cheaper to check the sum, which
    # is still in the processor's cache.
    return all_finite(out if torch.float16 in (compute, out.dtype) else weight)


def _merge_whole_transposed_dora(base: torch.Tensor, factors: Factors, compute: torch.dtype, out: torch.Tensor) -> None:
    """DoRA on a weight stored as (in, out): Conv1D, embeddings. Shapes and dtypes as in `_merge_block`, all rows.

    This follows PEFT operation by operation, memory layouts included: the order in which a norm adds up its terms depends on the
    strides of the sum, and those on the order of the operands.
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

    in' and out' are the matrix's columns and rows, or rows and columns if it is stored as (in, out). Raises MergeError if this
    machine would not give PEFT's bits.
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

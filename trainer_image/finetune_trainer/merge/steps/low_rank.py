"""Computes W + scaling * B@A in blocks of rows, for a weight or for one expert, bit-identical to peft 0.21.2 on a CPU.

The bits of a matrix product depend on the kernel that the library chooses for its shape. So a product is cut into blocks, added
to the weight while it is computed, or computed for a single expert, only if this gives the same bits on this machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from finetune_trainer.merge.changes import Orientation
from finetune_trainer.merge.steps.step import BLOCK_ROWS, Scratch, Step, row_blocks
from finetune_trainer.weights.errors import MergeError
from finetune_trainer.weights.rounding import all_finite, round_into
from finetune_trainer.weights.stored import ExpertPart

SELF_CHECK_BYTES = 32 << 20
"""Maximum size in bytes of the fp32 product with which blocks or single experts are compared. It limits the use of memory."""


@dataclass(frozen=True)
class Factors:
    """The factors of an adapter on one weight, in fp32. a: (r, in), b: (out, r), magnitude: (out,) or None."""

    a: torch.Tensor
    b: torch.Tensor
    magnitude: torch.Tensor | None
    scaling: float
    orientation: Orientation
    rounds_product: bool
    """Whether B@A is rounded to the weight's dtype before it is added, as for embeddings and expert parameters."""

    @property
    def is_transposed(self) -> bool:
        """Whether the weight is stored as (in, out), so that its rows are columns of B@A."""
        return self.orientation is not Orientation.LINEAR


Add = Callable[[Factors, int, int, torch.Tensor, Scratch], None]
"""A function that adds rows start..stop of scaling * B@A to a tensor with the same rows of the stored weight, in fp32 or fp64."""

_exact: dict[tuple[object, ...], Add | None] = {}
"""Results of `LowRankStep._add` in this process. The key contains everything that determines the library's choice of kernels."""
_equal_experts: set[tuple[int, ...]] = set()
"""Shapes (experts, rank, in, out) for which products of single experts had PEFT's bits in this process."""


@dataclass(frozen=True)
class LowRankStep(Step):
    """Adds the product of LoRA, rsLoRA or DoRA factors to one matrix."""

    factors: Factors
    compute: torch.dtype

    def row_blocks(self, num_rows: int, num_columns: int) -> list[tuple[int, int]]:
        """Return the blocks of rows, each computed by one product: a single block if smaller ones would give other bits."""
        # If the weight is transposed, DoRA's norms run across the stored rows, so no row can be finished alone.
        needs_whole = self.factors.magnitude is not None and self.factors.is_transposed
        # Blocks are compared now, in the thread that makes chunks. Workers would all do so at once, each in its own memory.
        return [(0, num_rows)] if needs_whole or self._add() is None else row_blocks(num_rows, num_columns)

    def _add(self) -> Add | None:
        """Return the fastest function that adds blocks of the product bit-identically to PEFT; None if there is none."""
        factors = self.factors
        # Most scalings are powers of two and at least 1. Multiplying by these is exact, in whatever order products are computed.
        is_exact_factor = factors.scaling >= 1 and math.frexp(factors.scaling)[0] == 0.5
        is_fp32 = torch.promote_types(self.compute, torch.float32) is torch.float32
        in_one_pass = is_exact_factor and is_fp32 and (factors.magnitude is not None or not factors.rounds_product)
        layout = factors.a.shape, factors.a.stride(), factors.b.shape, factors.b.stride()
        key = (factors.orientation, layout, factors.scaling, in_one_pass)
        if key not in _exact:
            ways = (add_while_multiplying, add_product) if in_one_pass else (add_product,)
            _exact[key] = next((add for add in ways if is_exact(add, factors)), None)
        return _exact[key]

    def apply(self, values: torch.Tensor, rows: tuple[int, int], out: torch.Tensor, scratch: Scratch) -> bool:
        factors, compute = self.factors, self.compute
        if factors.magnitude is None and factors.rounds_product:
            rounded = values.to(compute, copy=True)
            # The copy rounds the product and, if the weight is transposed, also changes its memory layout.
            rounded += torch.empty_like(rounded).copy_(scaled_product(factors, *rows, scratch))
            out.copy_(rounded)
            return all_finite(out)
        if factors.magnitude is not None and factors.is_transposed:
            # These are PEFT's operations, with the same memory layouts: the order in which a norm adds its terms depends on the
            # strides of the sum, which depend on the order of the operands.
            weight = values.to(compute)
            delta = (factors.b @ factors.a).T * factors.scaling
            norm = torch.linalg.norm(weight.T + 1 * delta.T, dim=1)
            round_into((factors.magnitude / norm).view(1, -1) * (weight + delta), compute, out)
            return all_finite(out)
        if torch.promote_types(compute, torch.float32) is not torch.float32:
            weight = values.to(compute, copy=True)
        else:
            is_in_place = compute == out.dtype == torch.float32 and factors.magnitude is None
            weight = (out if is_in_place else scratch.block(1, *values.shape)).copy_(values.to(compute))
        (self._add() or add_product)(factors, *rows, weight, scratch)
        if factors.magnitude is not None:
            norm = torch.linalg.norm(weight, dim=1)
            weight.mul_((factors.magnitude[slice(*rows)] / norm).view(-1, 1))
        if weight is not out:
            round_into(weight, compute, out)
        # Only float16 can overflow if the fp32 sum did not. For the other output dtypes it is cheaper to check the sum, which is
        # still in the processor's cache.
        return all_finite(out if torch.float16 in (compute, out.dtype) else weight)


def scaled_product(factors: Factors, start: int, stop: int, scratch: Scratch) -> torch.Tensor:
    """Return rows start..stop of the weight's change in fp32, as PEFT computes them. For a transposed weight, it is a view."""
    rows = slice(start, stop)
    left, right = (factors.b, factors.a[:, rows]) if factors.is_transposed else (factors.b[rows], factors.a)
    product = torch.mm(left, right, out=scratch.block(0, left.shape[0], right.shape[1])).mul_(factors.scaling)
    return product.T if factors.is_transposed else product


def add_product(factors: Factors, start: int, stop: int, weight: torch.Tensor, scratch: Scratch) -> None:
    """Compute the product, and then add it to the weight, as PEFT does."""
    delta = scaled_product(factors, start, stop, scratch)
    # The copy changes the memory layout: adding columns to rows would take three times as long as the merge's other arithmetic.
    weight += scratch.block(2, *delta.shape).copy_(delta) if factors.is_transposed else delta


def add_while_multiplying(factors: Factors, start: int, stop: int, weight: torch.Tensor, scratch: Scratch) -> None:  # noqa: ARG001 - an Add
    """Compute and add the product in one library call, which saves passes over the product and the weight."""
    rows = slice(start, stop)
    left, right = (factors.a[:, rows].T, factors.b.T) if factors.is_transposed else (factors.b[rows], factors.a)
    weight.addmm_(left, right, alpha=factors.scaling)


def is_exact(add: Add, factors: Factors) -> bool:
    """Whether `add` computes the first and last blocks bit-identically to one product over all of their rows, as in PEFT.

    SELF_CHECK_BYTES limits the number of blocks; a small weight is compared as a whole. This is called once per shape, because
    the library chooses its kernels by shape. The compared factors have the given memory layout but other values, because an
    adapter's factors may be zeros, for which all kernels agree.
    """

    def spread_like(tensor: torch.Tensor) -> torch.Tensor:
        """Return distinct, unordered values between -0.5 and 0.5, from the fractional parts of multiples of the golden ratio."""
        values = (torch.arange(1, tensor.numel() + 1, dtype=torch.float64) * 0.6180339887498949) % 1 - 0.5
        return torch.empty_strided(tensor.shape, tensor.stride()).copy_(values.view(tensor.shape))

    probe = replace(factors, a=spread_like(factors.a), b=spread_like(factors.b))
    num_rows, num_columns = len(probe.b), probe.a.shape[1]
    if probe.is_transposed:
        num_rows, num_columns = num_columns, num_rows
    blocks = row_blocks(num_rows, num_columns)
    allowed = max(2, SELF_CHECK_BYTES // (4 * num_columns * BLOCK_ROWS))
    scratch = Scratch()
    for group in [blocks] if len(blocks) <= allowed else [blocks[:allowed], blocks[-allowed:]]:
        first = group[0][0]
        whole = scaled_product(probe, first, group[-1][1], Scratch()).contiguous()
        for start, stop in group:
            delta = whole[start - first : stop - first]
            # A kernel may add the weight first or last, and a large weight hides the last digits of a product.
            for weight in (torch.zeros_like(delta), delta.flip(0).div_(3)):
                expected = weight + delta
                add(probe, start, stop, weight, scratch)
                if not torch.equal(weight, expected):
                    return False
    return True


def part_of_factors(
    a: torch.Tensor, b: torch.Tensor, part: ExpertPart, orientation: Orientation, shape: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the part of the factors that belongs to one stored matrix of `shape`: A (r, in) and B (out, r).

    a: (experts * r, all in), b: (all out, r * experts). `in` and `out` are the numbers of the matrix's columns and rows, or rows
    and columns if it is stored as (in, out). Raises MergeError if this machine would not compute the same bits as PEFT.
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
        # The zeros stay in the product, as in PEFT, so that torch's matrix library sees the same rank and picks the same kernel.
        before, after = part.zeros_before, part.zeros_after
        a = torch.cat([a.new_zeros(before, a.shape[1]), a, a.new_zeros(after, a.shape[1])])
        b = torch.cat([b.new_zeros(b.shape[0], before), b, b.new_zeros(b.shape[0], after)], dim=1)
    return a.contiguous(), b.contiguous()


def require_equal_products(a: torch.Tensor, b: torch.Tensor, num_experts: int) -> None:
    """Raise MergeError unless products of single experts are bit-identical to PEFT's product of all experts.

    SELF_CHECK_BYTES limits the number of experts that are compared.
    """
    rank, num_in, num_out = a.shape[0] // num_experts, a.shape[1], b.shape[0]
    shape = (num_experts, rank, num_in, num_out)
    if shape in _equal_experts:
        return
    a, b = a.float(), b.float()
    stacked_a, stacked_b = a.reshape(num_experts, rank, num_in), b.reshape(num_out, rank, num_experts)
    num_checked = min(num_experts, max(2, SELF_CHECK_BYTES // (4 * num_in * num_out)))
    whole = torch.einsum("ore,eri->eoi", stacked_b[:, :, :num_checked], stacked_a[:num_checked])
    for expert in range(num_checked):
        if not torch.equal(whole[expert], stacked_b[:, :, expert].contiguous() @ stacked_a[expert]):
            raise MergeError(
                f"adapter factors of {num_experts} experts, rank {rank}, {num_in} to {num_out} features: on this machine, "
                "products of single experts differ in some bits from the product of all experts, so the merge would differ from "
                "PEFT's. Merge on a machine with another processor type."
            )
    _equal_experts.add(shape)

"""The part of an adapter's factors that belongs to one stored matrix of a parameter which PEFT adapts whole.

PEFT (tuners/lora/layer.py, ParamWrapper) keeps the factors of all experts in two matrices, A (experts * r, in) with the experts
below each other and B (out, r * experts) with them interleaved, and multiplies all at once: einsum("o r e, e r i -> e o i"). Here
each stored matrix has a product of its own, which has the same bits where this machine's library computes a batch as it does its
members; `require_equal_products` looks once per shape.
"""

from __future__ import annotations

import torch

from finetune_trainer.merge.changes import Orientation
from finetune_trainer.weights.errors import MergeError
from finetune_trainer.weights.expert_part import ExpertPart

CHECK_BYTES = 32 << 20
"""fp32 bytes of the batch that single products are compared with, because memory is bounded."""

_checked: set[tuple[int, ...]] = set()
"""Shapes (experts, rank, in, out) that were found equal in this process."""


def part_of_factors(
    a: torch.Tensor, b: torch.Tensor, part: ExpertPart, orientation: Orientation, shape: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """a: (experts * r, in), b: (out, r * experts) -> (r, in') and (out', r) of a stored matrix of `shape`, in their dtype.

    in' and out' are the matrix's columns and rows, or rows and columns where it is stored as (in, out). Raises MergeError where
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
    """Compare products of single experts with PEFT's one product over as many of them as CHECK_BYTES allow. Raises MergeError."""
    rank, num_in, num_out = a.shape[0] // num_experts, a.shape[1], b.shape[0]
    shape = (num_experts, rank, num_in, num_out)
    if shape in _checked:
        return
    a, b = a.float(), b.float()
    stacked_a, stacked_b = a.reshape(num_experts, rank, num_in), b.reshape(num_out, rank, num_experts)
    num_checked = min(num_experts, max(2, CHECK_BYTES // (4 * num_in * num_out)))
    whole = torch.einsum("ore,eri->eoi", stacked_b[:, :, :num_checked], stacked_a[:num_checked])
    for expert in range(num_checked):
        if not torch.equal(whole[expert], stacked_b[:, :, expert].contiguous() @ stacked_a[expert]):
            raise MergeError(
                f"adapter factors of {num_experts} experts, rank {rank}, {num_in} to {num_out} features: this machine's matrix "
                "library multiplies experts one by one with other bits than together, so the merge would differ from PEFT's. Merge "
                "on a machine with another processor type."
            )
    _checked.add(shape)

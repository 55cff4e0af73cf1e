"""Cross-entropy, computed for a few positions at a time, so that the logits of a whole batch are never in memory.

The logits of a part, their float32 copy and their gradient exist only while the part is computed. If the output layer is a plain
linear layer, gradients are computed together with the loss, so logits are computed only once. The gradients already include the
weight of the loss, because multiplying by it later would round 16-bit values again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from finetune_memory.loss import ROWS_RECOMPUTED, rows_per_part


@dataclass(frozen=True)
class Targets:
    """The rows that are scored, and the tokens that they should predict. The tensors are int64 [N] on the model's device."""

    rows: torch.Tensor
    """Positions of the rows in a batch that is flattened to [B * T], ascending."""
    labels: torch.Tensor
    """Tokens: `labels[n]` is what row `rows[n]` should predict."""
    weight: float
    """Factor by which the summed loss is multiplied."""


def cross_entropy_of_linear(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: Targets, dtype: torch.dtype
) -> torch.Tensor:
    """Compute targets.weight * sum of -log p(label) for logits = hidden @ weight.T + bias, as a float32 scalar.

    hidden [..., H] is flattened to rows; weight [V, H], bias [V]; dtype: element type of the matrix products. log p is float32,
    and so are the sums over parts of the gradients of weight and bias. The result can be differentiated once.
    """
    if torch.is_grad_enabled():
        loss: torch.Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, targets, dtype)
        return loss
    rows = hidden.flatten(0, -2).index_select(0, targets.rows).to(dtype)
    matrix, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
    total = _zero(hidden.device)
    for part in parts(len(targets.rows), weight.shape[0], hidden.device):
        logits = functional.linear(rows[part], matrix, offset)
        total += functional.cross_entropy(logits.float(), targets.labels[part], reduction="sum")
    return (total * targets.weight).float()


def cross_entropy_of(rows: torch.Tensor, to_logits: Callable[[torch.Tensor], torch.Tensor], targets: Targets) -> torch.Tensor:
    """Compute the same weighted sum as `cross_entropy_of_linear`, for any output layer.

    rows: the rows [N, ...] that `targets` names. to_logits: converts n of these rows to logits [n, V]. The logits of a part are
    computed again in the backward pass.
    """
    if not len(targets.labels):
        # An empty sum must still depend on everything that is trained, or else backward hooks would not run on this rank.
        return to_logits(rows).float().sum() * targets.weight

    def part_sum(part_rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(to_logits(part_rows).float(), labels, reduction="sum")

    total = _zero(rows.device)
    num_rows = ROWS_RECOMPUTED
    for start in range(0, len(rows), num_rows):
        part_rows, labels = rows[start : start + num_rows], targets.labels[start : start + num_rows]
        if torch.is_grad_enabled():
            total = total + checkpoint(part_sum, part_rows, labels, use_reentrant=False, preserve_rng_state=False)
        else:
            total = total + part_sum(part_rows, labels)
    return (total * targets.weight).float()


def parts(num_rows: int, vocabulary: int, device: torch.device) -> Iterator[slice]:
    """Return consecutive slices that together cover range(num_rows)."""
    size = rows_per_part(vocabulary, device.type)
    return (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))


def _zero(device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=torch.float64, device=device)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes them in this way
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: Targets, dtype: torch.dtype
    ) -> torch.Tensor:
        flat = hidden.flatten(0, -2)
        rows = flat.index_select(0, targets.rows).to(dtype)
        matrix, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        rows_gradient = torch.empty_like(rows) if needs_hidden else None
        weight_gradient = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if needs_weight else None
        bias_gradient = torch.zeros(weight.shape[:1], dtype=torch.float32, device=weight.device) if needs_bias else None
        factor = torch.full((), targets.weight, dtype=torch.float32, device=hidden.device)
        total = _zero(hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for part in parts(len(rows), weight.shape[0], hidden.device):
                logits = functional.linear(rows[part], matrix, offset)
                added, logits_gradient = _with_gradient(logits, targets.labels[part], factor)
                total += added
                if rows_gradient is not None:
                    torch.mm(logits_gradient, matrix, out=rows_gradient[part])
                if weight_gradient is not None:
                    _add_product(weight_gradient, logits_gradient.t(), rows[part])
                if bias_gradient is not None:
                    bias_gradient += logits_gradient.sum(0, dtype=torch.float32)
                # Otherwise both would still be in memory while the next part's are computed: 2^27 values on a GPU.
                del logits, logits_gradient
        if rows_gradient is not None:
            whole = torch.zeros_like(flat)
            whole.index_copy_(0, targets.rows, rows_gradient.to(flat.dtype))
            ctx.hidden_gradient = whole.view(hidden.shape)
        ctx.weight_gradient = None if weight_gradient is None else weight_gradient.to(weight.dtype)
        ctx.bias_gradient = None if bias_gradient is None or bias is None else bias_gradient.to(bias.dtype)
        return (total * targets.weight).float()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, loss_gradient: torch.Tensor) -> tuple[Any, ...]:
        # Gradients are scaled in place, since only this function holds them and they are used once.
        gradients = [getattr(ctx, name, None) for name in ("hidden_gradient", "weight_gradient", "bias_gradient")]
        scaled = [None if gradient is None else gradient.mul_(loss_gradient) for gradient in gradients]
        ctx.hidden_gradient = ctx.weight_gradient = ctx.bias_gradient = None
        return (*scaled, None, None)


def _with_gradient(logits: torch.Tensor, labels: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of -log p(label), and the gradient of `factor` times that sum, computed by torch's own backward pass."""
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        total = functional.cross_entropy(leaf.float(), labels, reduction="sum")
    (gradient,) = torch.autograd.grad(total, leaf, factor)
    return total.detach(), gradient


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left @ right to `total` in float32, whatever the element type of the factors."""
    if left.dtype is torch.float32:
        total.addmm_(left, right)
    elif left.device.type == "cuda":
        total += torch.mm(left, right, out_dtype=torch.float32)
    else:
        total.addmm_(left.float(), right.float())

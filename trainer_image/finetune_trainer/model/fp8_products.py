"""Products with the base's frozen weights in FP8: both factors are rounded to E4M3 with a scale for each row of either.

A row's scale maps its largest value to the largest of E4M3 (448), so that one large value costs precision in its own row alone.
The weights stay in the element type that they were loaded in and are rounded again in each pass, forward by their outputs and
backward by their inputs: sharding, checkpoints, adapters and merging know nothing of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import ScalingType, scaled_mm

from finetune_job.module_names import is_router
from finetune_trainer.errors import ConfigError
from finetune_trainer.model.wrap_plan import layer_classes
from finetune_trainer.weights.rounding import dtype_name

FP8_FIELD = "spec.training.fp8"
KIND = torch.float8_e4m3fn
LARGEST = 448.0
"""Of E4M3."""
ALIGNED = 16
"""The kernels take factors whose sides are multiples of it."""
LEAST_CAPABILITY = (8, 9)
"""Of a GPU: the first one that has such products."""


class Fp8Linear(nn.Linear):
    """A linear layer of a frozen weight. Without `computes_in_fp8` it is torch's own."""

    computes_in_fp8 = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        """[..., features in] to [..., features out], in the type of the computation."""
        if not self.computes_in_fp8:
            return super().forward(input)
        kind = input.device.type
        computed = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.weight.dtype
        rows: torch.Tensor = _FrozenProduct.apply(input.flatten(0, -2).to(computed), self.weight)
        if self.bias is not None:
            rows = rows + self.bias.to(computed)
        return rows.view(*input.shape[:-1], -1)


class _FrozenProduct(torch.autograd.Function):
    """rows [M, K] and weight [N, K] to [M, N]; the gradient of the rows alone."""

    @staticmethod
    def forward(context: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(weight)
        return scaled_product(rows, weight, sums_fast=True)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (weight,) = context.saved_tensors
        return scaled_product(gradients[0], weight.t(), sums_fast=False), None


def scaled_product(first: torch.Tensor, second: torch.Tensor, *, sums_fast: bool) -> torch.Tensor:
    """[M, K] times the transpose of [N, K], in bfloat16.

    sums_fast: Hopper may keep sums in its tensor cores, with fewer bits than float32. Gradients, whose values differ more in
    size, are summed in float32.
    """
    left, left_scale = rounded(first)
    right, right_scale = rounded(second)
    by_row = ScalingType.RowWise
    # On a CPU torch multiplies by the scales and then makes a product of its own, which autocast would round once more.
    with torch.autocast(first.device.type, enabled=False):
        return scaled_mm(left, right.t(), left_scale, by_row, right_scale.t(), by_row, use_fast_accum=sums_fast)


def rounded(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, C] in E4M3, row after row, and the float32 scales [R, 1] that it has to be multiplied by.

    Rows of zeros have the scale 1; a row with a value that is not finite has results that are not, either.
    """
    largest = matrix.abs().amax(dim=1, keepdim=True).float()
    scale = torch.where(largest == 0, 1.0, largest / LARGEST)
    return (matrix.float() / scale).to(KIND).contiguous(), scale


def install_fp8(model: nn.Module, classes: Collection[str] | None, device: torch.device, computed: torch.dtype) -> int:
    """Let the layers' frozen linear layers multiply so; how many there are. Call before compilation and sharding.

    classes: of transformer layers; None: those that the model names. computed: element type of products. Raises ConfigError.
    """
    found = frozen_linear_layers(model, classes)
    problem = model_problem(found, computed) or device_problem(device)
    if problem:
        raise ConfigError(f"{FP8_FIELD}: {problem}", f"set {FP8_FIELD}: false")
    for linear in found.values():
        # A class, not a function of this layer: compiled code holds for all layers of one type.
        linear.__class__ = Fp8Linear
    return len(found)


def model_problem(layers: Mapping[str, nn.Linear], computed: torch.dtype) -> str:
    """Why these layers of a model cannot compute so; empty: they can."""
    if computed is not torch.bfloat16:
        return f"products are {dtype_name(computed)}, and those of FP8 are bfloat16"
    return "" if layers else f"no frozen linear layer within transformer layers has sides that are multiples of {ALIGNED}"


def frozen_linear_layers(model: nn.Module, classes: Collection[str] | None) -> dict[str, nn.Linear]:
    """By name, those within transformer layers whose products FP8 can make. Raises ConfigError as `layer_classes`."""
    wanted = set(layer_classes(model, classes))
    return {
        f"{layer_name}.{name}": module
        for layer_name, layer in model.named_modules()
        if type(layer).__name__ in wanted
        for name, module in layer.named_modules()
        if type(module) is nn.Linear
        and not module.weight.requires_grad
        and module.in_features % ALIGNED == 0
        and module.out_features % ALIGNED == 0
        # Its few outputs choose experts: what is saved is nothing, and what is chosen depends on small differences.
        and not is_router(name)
    }


@contextmanager
def without_fp8(model: nn.Module) -> Iterator[None]:
    """Until the end of the block the layers multiply as torch's own do."""
    changed = [module for module in model.modules() if isinstance(module, Fp8Linear)]
    for module in changed:
        module.computes_in_fp8 = False
    try:
        yield
    finally:
        for module in changed:
            del module.computes_in_fp8


def device_problem(device: torch.device) -> str:
    """Why this device cannot compute so; empty: it can. A CPU does, slowly."""
    if device.type == "cpu":
        return ""
    if torch.version.hip is not None:
        return "the FP8 of AMD's GPUs is of another form"
    capability = torch.cuda.get_device_capability(device)
    if capability >= LEAST_CAPABILITY:
        return _refusal(device)
    least, found = (".".join(map(str, each)) for each in (LEAST_CAPABILITY, capability))
    return f"{torch.cuda.get_device_name(device)} has compute capability {found}, and products in FP8 need {least}"


def _refusal(device: torch.device) -> str:
    """What torch says against such a product on this device; empty: nothing."""
    one = torch.ones(ALIGNED, ALIGNED, dtype=torch.bfloat16, device=device)
    try:
        _FrozenProduct.apply(one.requires_grad_(), one.detach()).sum().backward()
    except RuntimeError as error:
        return f"torch has no such products there: {str(error).splitlines()[0]}"
    return ""

"""Adapters attached without values: PEFT's own code on torch's meta device, where its first values cost neither time nor memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.errors import ConfigError
from finetune_trainer.model.adapters import attach
from finetune_trainer.model.load import build_unwritten

META = "meta"
_MOVES = frozenset({"to", "cpu", "cuda"})


class Valueless(TorchFunctionMode):
    """Everything that is made is on the meta device and stays there, and random numbers are drawn by no generator.

    Some methods draw what they start from with a generator of the CPU, or move it there; the meta device has neither numbers nor
    a generator.
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = {name: value for name, value in (kwargs or {}).items() if name != "generator"}
        is_here = bool(args) and isinstance(args[0], torch.Tensor) and args[0].is_meta
        if is_here and getattr(function, "__name__", "") in _MOVES:
            if function.__name__ != "to":
                return args[0]
            args = (args[0], *(META if isinstance(each, torch.device | str) else each for each in args[1:]))
            if named.get("device") is not None:
                named["device"] = META
        return function(*args, **named)


def attach_valueless(base: PreTrainedModel, plan: RunPlan, directory: Path) -> PeftModel:
    """The model with its adapters, as `attach` makes it, but for the values. Raises ConfigError as it does."""
    try:
        with Valueless(), torch.device(META):
            adapted = attach(base, plan)
    except ConfigError as error:
        if plan.method.adapter is None or not isinstance(error.__cause__, RuntimeError):
            raise
        # Some methods cannot say how large their tensors are before they have drawn or counted values; those need the room.
        return attach(build_unwritten(plan, directory), plan)
    if not plan.method.autocast_adapter_dtype:
        _hold_as_the_base(adapted)
    return adapted


def _hold_as_the_base(adapted: PeftModel) -> None:
    """What PEFT does as it adds an adapter, except to tensors on the meta device: give it its base layer's element type."""
    for layer in adapted.modules():
        if isinstance(layer, BaseTunerLayer):
            weight = getattr(layer.get_base_layer(), "weight", None)
            if isinstance(weight, torch.Tensor) and weight.is_floating_point():
                for name in layer.adapter_layer_names:
                    getattr(layer, name).to(weight.dtype)

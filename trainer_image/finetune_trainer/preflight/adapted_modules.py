"""Describes a model with adapters: which modules have an adapter, which are packed, and what their names in the base are.

PEFT wraps modules of the base, and the whole base, in modules of its own, so neither names nor weights are where the manifest
expects them. The checks of attached adapters use this: attached.py, experts.py, bypassed.py and adapter_names.py.
"""

from __future__ import annotations

from typing import Any

from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from finetune_job.methods import INSIDE_PEFT
from finetune_job.plan.method_plan import MethodPlan


def name_in_base(name: str) -> str:
    """Returns the name in the base of the module that PEFT calls `name`."""
    return name.removeprefix(INSIDE_PEFT).replace(".base_layer", "")


def adapted_modules(model: nn.Module) -> dict[str, BaseTunerLayer]:
    """Returns PEFT's layers by name in the base, for adapted modules and for adapted parameters that are not a layer's weight."""
    return {
        name_in_base(f"{name}.{layer.parameter_name}" if isinstance(layer, ParamWrapper) else name): layer
        for name, layer in model.named_modules()
        if isinstance(layer, BaseTunerLayer)
    }


def is_packed(module: nn.Module) -> bool:
    """Whether the module's weight is packed by bitsandbytes."""
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    return isinstance(module, Linear4bit | Linear8bitLt)


def adapter_settings(method: MethodPlan) -> dict[str, Any]:
    """Returns the manifest's settings for a method outside the LoRA family; empty for the LoRA family."""
    return {} if method.adapter is None else method.adapter.settings

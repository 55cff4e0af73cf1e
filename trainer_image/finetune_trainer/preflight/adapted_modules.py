"""A model with adapters in the words of its base: what has an adapter, what is packed, and how the base names it.

PEFT puts modules of its own around those of the base, and itself around all of them, so that neither names nor weights are where
the manifest has them. Asked by the checks of what is attached: attached.py, experts.py, bypassed.py and adapter_names.py.
"""

from __future__ import annotations

from typing import Any

from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from finetune_job.methods import INSIDE_PEFT
from finetune_job.plan.method_plan import MethodPlan


def name_in_base(name: str) -> str:
    """The name that the base has for what PEFT calls `name`."""
    return name.removeprefix(INSIDE_PEFT).replace(".base_layer", "")


def adapted_modules(model: nn.Module) -> dict[str, BaseTunerLayer]:
    """What has an adapter, by its name in the base: modules, and parameters of which none is a layer's weight."""
    return {
        name_in_base(f"{name}.{layer.parameter_name}" if isinstance(layer, ParamWrapper) else name): layer
        for name, layer in model.named_modules()
        if isinstance(layer, BaseTunerLayer)
    }


def is_packed(module: nn.Module) -> bool:
    """Whether bitsandbytes holds its weight."""
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    return isinstance(module, Linear4bit | Linear8bitLt)


def adapter_settings(method: MethodPlan) -> dict[str, Any]:
    """What the manifest sets of a method other than LoRA's family; empty for that."""
    return {} if method.adapter is None else method.adapter.settings

"""The model's adapters without values, and what PEFT does to real ones beside it. Called by preflight/meta_model.py."""

from __future__ import annotations

from pathlib import Path

from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel

from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.errors import ConfigError
from finetune_trainer.model.adapters import attach
from finetune_trainer.model.load import build_unwritten
from finetune_trainer.model.without_values import without_values


def attach_valueless(base: PreTrainedModel, plan: RunPlan, directory: Path) -> PeftModel:
    """The model with its adapters, as `attach` makes it, but for the values. Raises ConfigError as it does."""
    try:
        with without_values():
            adapted = attach(base, plan)
    except ConfigError as error:
        if plan.method.adapter is None or not isinstance(error.__cause__, RuntimeError):
            raise
        # With some settings a method cannot say how large its tensors are before it has drawn or counted values.
        return attach(build_unwritten(plan, directory), plan)
    if not plan.method.autocast_adapter_dtype:
        _hold_as_the_base(adapted)
    return adapted


def _hold_as_the_base(adapted: PeftModel) -> None:
    """What PEFT does as it adds an adapter, except to tensors on the meta device: give it its base layer's element type.

    Of packed weights that is the type in which they compute, whatever they are stored as.
    """
    for layer in adapted.modules():
        if isinstance(layer, BaseTunerLayer):
            base = layer.get_base_layer()
            weight = layer.get_param() if isinstance(layer, ParamWrapper) else getattr(base, "weight", None)
            dtype = getattr(base, "compute_dtype", None) or getattr(weight, "dtype", None)
            if dtype is not None and dtype.is_floating_point:
                for name in layer.adapter_layer_names:
                    getattr(layer, name).to(dtype)

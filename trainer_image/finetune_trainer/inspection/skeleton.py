"""Builds base model and adapters on the meta device, with the names, shapes and element types of transformers and PEFT.

Reads no weights. Used by preflight and the rehearsal.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel

from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.errors import ConfigError
from finetune_trainer.model.adapters import attach
from finetune_trainer.model.dtypes import resolve_dtypes
from finetune_trainer.model.invariants import MAGNITUDE
from finetune_trainer.model.load import (
    SAFETENSORS_DTYPES,
    attention_of,
    build_on_meta,
    build_with_lazy_zeros,
    freeze_as_built,
    stored_dtype,
)
from finetune_trainer.model.meta_device import on_meta_device
from finetune_trainer.weights.headers import read_checkpoint

FIELD = "spec.model.source"
META = torch.device("meta")
DTYPES = SAFETENSORS_DTYPES | {
    "F64": torch.float64, "I64": torch.int64, "U64": torch.uint64, "I32": torch.int32, "U32": torch.uint32, "I16": torch.int16,
    "U16": torch.uint16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""Name of an element type in safetensors -> torch's element type."""


def load_skeleton(plan: RunPlan, directory: Path) -> tuple[PreTrainedModel, list[Finding]]:
    """Return the model on the meta device, and findings about its files. Raises transformers' errors if it refuses the model."""
    headers = read_checkpoint(directory).tensors.values()
    declared = {header.name: torch.empty(header.shape, dtype=DTYPES[header.dtype], device=META) for header in headers}
    built = build_on_meta(plan, directory)
    loaded, info = type(built).from_pretrained(
        None,
        config=built.config,
        state_dict=declared,
        device_map={"": META},
        dtype=resolve_dtypes(plan, stored_dtype(directory)).load,
        attn_implementation=attention_of(plan, built.config),
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    model: PreTrainedModel = loaded
    freeze_as_built(model, built)
    model.train()
    return model, list(_incomplete(info))


def _incomplete(info: dict[str, Any]) -> Iterator[Finding]:
    """Yield findings about weights that transformers would initialise at random, or could not convert."""
    fix = "copy all files of one and the same model"
    for kind, reason in (("missing_keys", "are in none of the files"), ("mismatched_keys", "have another shape in the files")):
        names = sorted(str(key[0]) if isinstance(key, tuple) else str(key) for key in info[kind])
        if names:
            message = f"{len(names)} weights that config.json calls for {reason}; the first are {', '.join(names[:3])}"
            yield _finding(names[0], message, f"{fix}; these weights would start at random")
    errors = info.get("error_msgs") or info.get("conversion_errors")
    if errors:
        first = next(iter(errors.items() if isinstance(errors, dict) else errors))
        message = f"transformers cannot convert the files' tensors to those of the model: {str(first)[:300]}"
        yield _finding("config.json", message, fix)


def _finding(value: str, message: str, fix: str) -> Finding:
    return make_finding("model-weights-incomplete", field=FIELD, value=value, message=message, fix=fix)


def attach_skeleton_adapters(base: PreTrainedModel, plan: RunPlan, directory: Path) -> PeftModel:
    """Return the model with the adapters that `attach` makes, but as meta tensors. Raises ConfigError as `attach` does."""
    try:
        with on_meta_device():
            adapted = attach(base, plan)
    except ConfigError as error:
        if plan.method.adapter is None or not isinstance(error.__cause__, RuntimeError):
            raise
        # With some settings, tensor sizes depend on the values of weights. Meta tensors have no values, so zeros are used.
        return attach(build_with_lazy_zeros(plan, directory), plan)
    if not plan.method.autocast_adapter_dtype:
        _hold_as_the_base(adapted, base.dtype)
    return adapted


def _hold_as_the_base(adapted: PeftModel, loaded: torch.dtype) -> None:
    """Give adapter tensors the element type of their base layer, as PEFT does outside the meta device.

    For a quantized layer, this is the type in which it computes, not the type in which it is stored. Magnitudes are computed from
    the weights before quantization, whose element type is `loaded`.
    """
    for layer in adapted.modules():
        if isinstance(layer, BaseTunerLayer):
            base = layer.get_base_layer()
            weight = layer.get_param() if isinstance(layer, ParamWrapper) else getattr(base, "weight", None)
            dtype = getattr(base, "compute_dtype", None) or getattr(weight, "dtype", None)
            if dtype is not None and dtype.is_floating_point:
                for name in layer.adapter_layer_names:
                    is_measured = name == MAGNITUDE and hasattr(base, "compute_dtype")
                    getattr(layer, name).to(torch.promote_types(dtype, loaded) if is_measured else dtype)

"""The weights of a base that a QLoRA training quantized, and how: for a merge into the weights that its adapter saw (merge.base:
Dequantized).

transformers' own rules decide which layers bitsandbytes replaces; the model is built without weights for this. The module imports
transformers, so only such a merge imports it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from finetune_job.plan.method_plan import QuantizationPlan
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.merge.changes import Quantization
from finetune_trainer.model.dtypes import resolve_dtypes
from finetune_trainer.model.load import quantization_config, stored_dtype
from finetune_trainer.weights.errors import UnsupportedBaseError
from finetune_trainer.weights.rounding import dtype_name
from finetune_trainer.weights.stored import StoredModel


def packed_in_training(plan: RunPlan, base: Path) -> Quantization | None:
    """Quantization of the base in the plan's training, or None without one. Raises UnsupportedBaseError for 8 bits."""
    if plan.method.quantization is None:
        return None
    return training_quantization(plan.method.quantization, resolve_dtypes(plan, stored_dtype(base)).load)


def training_quantization(plan: QuantizationPlan, load: torch.dtype) -> Quantization:
    """Quantization by the trainer of a model that it loaded in `load`. Raises UnsupportedBaseError for 8 bits."""
    config = quantization_config(plan, load, load)
    if not config.load_in_4bit:
        raise UnsupportedBaseError(
            f"method.quantization.bits is {plan.bits}: only 4-bit bases can be written out as they were trained on. Set "
            "merge.base to Original."
        )
    return Quantization(
        quant_type=config.bnb_4bit_quant_type,
        double_quant=config.bnb_4bit_use_double_quant,
        load_dtype=dtype_name(load),
        compute_dtype=dtype_name(config.bnb_4bit_compute_dtype),
    )


def quantized_tensors(base: Path, stored: StoredModel, quantization: Quantization) -> dict[str, Quantization]:
    """Stored tensors of the model in `base` that a training with these settings quantizes -> how.

    Raises UnsupportedBaseError if a quantized weight has no stored tensor of its own.
    """
    tensors: dict[str, Quantization] = {}
    for path, is_transposed in quantized_parameters(_structure(base)).items():
        parameter = stored.parameter(path)
        if parameter is None or len(parameter.parts) != 1 or parameter.parts[0].expert is not None:
            raise UnsupportedBaseError(
                f"base parameter {path}: was packed in training, but the files hold no tensor of its own for it. Set "
                "merge.base to Original."
            )
        tensors[parameter.parts[0].header.name] = replace(quantization, is_transposed=is_transposed)
    return tensors


def quantized_parameters(model: PreTrainedModel) -> dict[str, bool]:
    """Paths of weights that transformers hands to bitsandbytes when it loads `model` quantised -> whether it transposes them
    before.

    Source: transformers 5.23, integrations/bitsandbytes.py, replace_with_bnb_linear. The trainer names no exceptions of its own.
    """
    kept = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)  # noqa: SLF001 - as the quantiser does
    return {
        f"{name}.weight": isinstance(module, Conv1D)
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or isinstance(module, Conv1D)) and should_convert_module(name, kept)
    }


def _structure(base: Path) -> PreTrainedModel:
    try:
        config = AutoConfig.from_pretrained(base, trust_remote_code=False, local_files_only=True)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (ValueError, OSError) as error:
        raise UnsupportedBaseError(
            f"{base}: transformers cannot build the model, so that what was packed in training is not known: {error}. Set "
            "merge.base to Original."
        ) from error
    return model

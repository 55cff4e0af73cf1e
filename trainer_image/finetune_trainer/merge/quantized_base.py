"""Finds which weights of a base were quantized in QLoRA training, and how, for a merge into the dequantized weights.

`merge.base: Dequantized` selects such a merge. transformers' own rules decide which layers bitsandbytes replaces; to apply these
rules, the model is built without weights. Only such a merge imports this module, because it imports transformers.
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
    """Return how training by this plan quantizes the base; None if it does not. Raises UnsupportedBaseError for 8 bits."""
    if plan.method.quantization is None:
        return None
    return training_quantization(plan.method.quantization, resolve_dtypes(plan, stored_dtype(base)).load)


def training_quantization(plan: QuantizationPlan, load: torch.dtype) -> Quantization:
    """Return how the trainer quantizes a model that it loads in the dtype `load`. Raises UnsupportedBaseError for 8 bits."""
    config = quantization_config(plan, load, load)
    if not config.load_in_4bit:
        raise UnsupportedBaseError(
            f"method.quantization.bits is {plan.bits}: only bases that were quantized to 4 bits can be written dequantized. Set "
            "merge.base to Original."
        )
    return Quantization(
        quant_type=config.bnb_4bit_quant_type,
        double_quant=config.bnb_4bit_use_double_quant,
        load_dtype=dtype_name(load),
        compute_dtype=dtype_name(config.bnb_4bit_compute_dtype),
    )


def quantized_tensors(base: Path, stored: StoredModel, quantization: Quantization) -> dict[str, Quantization]:
    """Return a mapping from each stored tensor that training with these settings quantizes to how it is quantized.

    Raises UnsupportedBaseError if a quantized weight is not stored as one tensor.
    """
    tensors: dict[str, Quantization] = {}
    for path, is_transposed in quantized_parameters(_structure(base)).items():
        tensor = stored.own_tensor(path)
        if tensor is None:
            raise UnsupportedBaseError(
                f"base parameter {path} was quantized in training, but is not stored as a tensor of its own. Set merge.base to "
                "Original."
            )
        tensors[tensor.name] = replace(quantization, is_transposed=is_transposed)
    return tensors


def quantized_parameters(model: PreTrainedModel) -> dict[str, bool]:
    """Return path -> whether it is transposed first, for each weight that bitsandbytes quantizes when transformers loads `model`.

    Source: transformers 5.23, integrations/bitsandbytes.py, replace_with_bnb_linear. The trainer excludes no further modules.
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
            f"{base}: transformers cannot build the model, which shows what was quantized in training: {error}. Set merge.base "
            "to Original."
        ) from error
    return model

"""PEFT adapters from the plan, and the names under which PEFT stores them."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from transformers import PreTrainedModel

from finetune_job.api.method import ALL_LINEAR
from finetune_job.plan.run_plan import LoraPlan, RunPlan
from finetune_trainer.errors import ConfigError


def lora_config(lora: LoraPlan) -> LoraConfig:
    """PEFT's settings. Nothing in them names a machine or a path."""
    targets: str | list[str] = ALL_LINEAR if lora.target_modules == (ALL_LINEAR,) else list(lora.target_modules)
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=targets,
        modules_to_save=list(lora.modules_to_save) or None,
        rank_pattern=dict(lora.rank_pattern),
        alpha_pattern=dict(lora.alpha_pattern),
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        bias=lora.bias.value,
    )


def attach(model: PreTrainedModel, plan: RunPlan) -> PeftModel:
    """The model with fresh adapters, its base frozen. Call before sharding.

    Seeded by the plan alone, so every rank of every world size starts with the same values. Raises ConfigError.
    """
    lora = plan.method.lora
    if lora is None:
        raise ConfigError(f"spec.method.lora: is required with method {plan.method.type.value}")
    torch.manual_seed(plan.training.seed)
    try:
        adapted = get_peft_model(model, lora_config(lora), autocast_adapter_dtype=lora.autocast_adapter_dtype)
    except ValueError as error:
        raise ConfigError(
            f"spec.method.lora: PEFT refuses these settings for this model: {error}",
            "check targetModules and modulesToSave against the model's module names",
        ) from error
    if not isinstance(adapted, PeftModel):
        raise ConfigError("spec.method.lora: PEFT made no adapter model")
    adapted.train()
    return adapted


def stored_names(model: PeftModel) -> dict[str, str]:
    """Parameter name in the model -> tensor name in adapter_model.safetensors, as PEFT itself would write it."""
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    stored = get_peft_model_state_dict(model, state_dict=dict(trainable), save_embedding_layers=False)
    by_identity = {id(parameter): name for name, parameter in trainable.items()}
    return {by_identity[id(parameter)]: name for name, parameter in stored.items()}


def adapter_settings(model: PeftModel, base_model: str) -> dict[str, Any]:
    """Content of adapter_config.json; sets are sorted, so equal runs give equal bytes."""
    settings = model.peft_config["default"].to_dict()
    settings["base_model_name_or_path"] = base_model
    settings["inference_mode"] = True
    return {name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()}

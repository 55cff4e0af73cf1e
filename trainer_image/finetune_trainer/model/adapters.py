"""PEFT adapters from the plan, and the names under which PEFT stores them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from transformers import PreTrainedModel

from finetune_job.api.method import ALL_LINEAR, LoraInit
from finetune_job.methods import METHODS
from finetune_job.plan.run_plan import LoraPlan, MethodPlan, RunPlan
from finetune_trainer.errors import ConfigError, InvariantError
from finetune_trainer.model.method_settings import config_class, peft_fields

TASK = "CAUSAL_LM"
_INITS = {LoraInit.ZERO_B: True, LoraInit.RANDOM: False}
"""What PEFT writes as a truth value."""


def lora_config(lora: LoraPlan) -> LoraConfig:
    """PEFT's settings. Nothing in them names a machine or a path."""
    targets: str | list[str] = ALL_LINEAR if lora.target_modules == (ALL_LINEAR,) else list(lora.target_modules)
    return LoraConfig(
        task_type=TASK,
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=targets,
        exclude_modules=list(lora.exclude_modules) or None,
        layers_to_transform=None if lora.layers_to_transform is None else list(lora.layers_to_transform),
        init_lora_weights=_INITS.get(lora.init_lora_weights, lora.init_lora_weights.value),
        modules_to_save=list(lora.modules_to_save) or None,
        rank_pattern=dict(lora.rank_pattern),
        alpha_pattern=dict(lora.alpha_pattern),
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        bias=lora.bias.value,
    )


def adapter_config(method: MethodPlan) -> PeftConfig:
    """PEFT's settings of any method with an adapter. Raises ConfigError naming the setting."""
    try:
        if method.lora is not None:
            return lora_config(method.lora)
        if method.adapter is None:
            raise ConfigError(f"spec.method.type: {method.type.value} has no adapter")
        values, wrong = peft_fields(method.type, method.adapter.settings)
        for problem in wrong:
            raise ConfigError(f"spec.method.settings.{problem.name}: {problem.value!r}: {problem.reason}", problem.fix)
        return config_class(method.type)(task_type=TASK, **values)
    except (TypeError, ValueError) as error:
        field = METHODS[method.type].family.value
        raise ConfigError(f"spec.{field}: PEFT refuses these settings: {error}", "change them as it says") from error


def attach(model: PreTrainedModel, plan: RunPlan) -> PeftModel:
    """The model with fresh adapters, its base frozen. Call before sharding.

    Seeded by the plan alone, so every rank of every world size starts with the same values. Raises ConfigError.
    """
    config = adapter_config(plan.method)
    field = METHODS[plan.method.type].family.value
    torch.manual_seed(plan.training.seed)
    try:
        adapted = get_peft_model(model, config, autocast_adapter_dtype=plan.method.autocast_adapter_dtype)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise ConfigError(
            f"spec.{field}: PEFT refuses these settings for this model: {error}",
            "check them, targetModules first, against the model's module names",
        ) from error
    if not isinstance(adapted, PeftModel):
        raise ConfigError(f"spec.{field}: PEFT made no adapter model")
    adapted.train()
    return adapted


def stored_names(model: PeftModel) -> dict[str, str]:
    """Parameter name in the model -> tensor name in adapter_model.safetensors, as PEFT itself would write it.

    Raises InvariantError where PEFT would leave a trained parameter out.
    """
    trainable = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    names = {trainable[id(tensor)]: stored for stored, tensor in _stored(model) if id(tensor) in trainable}
    if lost := sorted(set(trainable.values()) - set(names)):
        raise InvariantError(f"PEFT would not save what is trained, first: {lost[:3]}")
    return names


def fixed_tensors(model: PeftModel) -> dict[str, torch.Tensor]:
    """What PEFT stores beside the trained parameters, such as random projections: values that follow from the settings alone."""
    trainable = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    return {stored: tensor.detach() for stored, tensor in _stored(model) if id(tensor) not in trainable}


def _stored(model: PeftModel) -> Iterator[tuple[str, torch.Tensor]]:
    # Parameters themselves, not views of them, so that identity tells which is which.
    state = model.state_dict(keep_vars=True)
    yield from get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False).items()


def adapter_settings(model: PeftModel, base_model: str, revision: str | None = None) -> dict[str, Any]:
    """Content of adapter_config.json; sets are sorted, so equal runs give equal bytes."""
    settings = model.peft_config["default"].to_dict()
    settings["base_model_name_or_path"] = base_model
    settings["revision"] = revision
    settings["inference_mode"] = True
    return {name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()}

"""The names in the settings of an adapter, checked against the loaded model (module_names.py has the rules of matching)."""

from __future__ import annotations

from torch import nn
from transformers.pytorch_utils import Conv1D

from finetune_job.rules.rule import Finding
from finetune_trainer.preflight.fused_experts import taken_for_experts
from finetune_trainer.preflight.model_inspection import ModelInspection
from finetune_trainer.preflight.module_names import (
    wrong_method_settings,
    wrong_module_names,
    wrong_parameters,
    wrong_token_indices,
)

ADAPTABLE = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, Conv1D)
"""Module classes that PEFT's LoRA layers can stand in for (peft.tuners.lora.model, dispatchers)."""


def check_method_settings(seen: ModelInspection) -> list[Finding]:
    """Settings of methods other than LoRA."""
    method = seen.plan.method
    return [] if method.adapter is None else wrong_method_settings(method.type, method.adapter, _modules(seen))


def check_module_names(seen: ModelInspection) -> list[Finding]:
    """Names of modules to adapt, to exclude and to train whole, numbers of layers, and patterns."""
    adaptable = [name for name, module in seen.base.named_modules() if isinstance(module, ADAPTABLE)]
    return wrong_module_names(seen.lora, adaptable, _modules(seen), _parameters(seen), taken_for_experts(seen.lora, seen.base))


def check_parameter_names(seen: ModelInspection) -> list[Finding]:
    """Names of parameters to adapt."""
    return wrong_parameters(seen.lora, _parameters(seen))


def check_token_indices(seen: ModelInspection) -> list[Finding]:
    """Rows of the embedding to train."""
    return [] if seen.loaded is None else wrong_token_indices(seen.lora, seen.loaded.vocabulary_size)


def _modules(seen: ModelInspection) -> list[str]:
    return [name for name, _ in seen.base.named_modules()]


def _parameters(seen: ModelInspection) -> dict[str, int]:
    """Name -> number of dimensions."""
    return {name: parameter.ndim for name, parameter in seen.base.named_parameters()}

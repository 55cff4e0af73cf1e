"""Turns errors of the libraries and of this trainer into findings. model/library_texts.py has the libraries' error texts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.alias_generators import to_camel, to_snake
from torch import nn
from transformers.pytorch_utils import Conv1D

from finetune_job.api.method import ALL_LINEAR, MethodType
from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_job.method_settings import TARGETS, effective_settings, known_settings
from finetune_job.module_names import ADAPTER
from finetune_job.plan.run_plan import RunPlan
from finetune_job.rules.rule import format_value
from finetune_trainer.errors import TrainerError
from finetune_trainer.model.adapters import unfit_for_experts
from finetune_trainer.model.library_texts import (
    BEYOND_LAYER,
    NOT_DIVISIBLE,
    REFUSED_CLASS,
    REFUSED_MODULE,
    STACKED_WEIGHTS,
    UNKNOWN_ATTENTION,
)
from finetune_trainer.preflight.bypassed import bypassed_linear
from finetune_trainer.preflight.model_inspection import ModelInspection

_SETTINGS = "spec.method.settings"
_LONGEST_VALUE = 300


def loading_error(seen: ModelInspection, error: Exception) -> Finding:
    """Explains why the libraries cannot build the model."""
    if UNKNOWN_ATTENTION.search(str(error)):
        field = "spec.model.attention"
        return make_finding(
            "attention-not-supported",
            field=field,
            value=seen.plan.model.attention.value,
            message=f"transformers has no such attention for this model: {str(error)[:300]}",
            fix=f"set {field}: eager",
            changes={field: "eager"},
        )
    return finding_of_error("model-not-accepted", "spec.model.source", seen.directory.name, error)


def attaching_error(seen: ModelInspection, error: TrainerError) -> Finding:
    """Explains why this model cannot be trained with these settings, using the first row of _ATTACHING that gives a finding."""
    for text, explain in _ATTACHING:
        match = text.search(str(error))
        finding = explain(seen, error, match) if match is not None else None
        if finding is not None:
            return finding
    return _conflict(seen, error)


def finding_of_error(
    identifier: str, field: str, value: str, error: Exception, *, changes: Mapping[str, Any] | None = None, fix: str = ""
) -> Finding:
    """Turns an error into a finding, with the hint of a trainer's error or the class name of a library's error."""
    message = str(error).removeprefix(f"{field}: ")
    is_ours = isinstance(error, TrainerError)
    hint = error.hint if isinstance(error, TrainerError) else ""
    return make_finding(
        identifier,
        field=field,
        value=value,
        message=message if is_ours else f"{type(error).__name__}: {message}",
        fix=fix or hint or "check config.json and the architecture that it names against the libraries of the trainer image",
        changes=changes,
    )


def _conflict(seen: ModelInspection, error: Exception, changes: Mapping[str, Any] | None = None, fix: str = "") -> Finding:
    # The trainer's own errors begin with a field. Errors of libraries are about the method as a whole.
    field, colon, _ = str(error).partition(":")
    field = field if colon and field.startswith("spec.") else "spec.method.type"
    return finding_of_error("model-settings-conflict", field, _planned(seen.plan, field), error, changes=changes, fix=fix)


def _planned(plan: RunPlan, field: str) -> str:
    """Returns the plan's value of a field of the spec, formatted as in a manifest."""
    adapter = plan.method.adapter
    if field.startswith(_SETTINGS) and adapter is not None:
        name = field.removeprefix(_SETTINGS).removeprefix(".")
        # An error may name a setting that the method does not have; its value is then None.
        planned = effective_settings(plan.method.type, adapter.settings).get(name) if name else adapter.settings
    else:
        planned = plan
        for part in field.split(".")[1:]:
            planned = getattr(planned, to_snake(part))
    if isinstance(planned, BaseModel):
        planned = {
            to_camel(name): value for name, value in planned.model_dump(mode="json").items() if value not in (None, [], {})
        }
    return format_value(planned)[:_LONGEST_VALUE]


def _stacked_weights(seen: ModelInspection, error: Exception, _: re.Match[str]) -> Finding:
    """Explains why PEFT refuses stacked weights; the fix has the settings with which PEFT can adapt them."""
    return _conflict(seen, error, unfit_for_experts(seen.plan.method))


def _refused_module(seen: ModelInspection, error: Exception, refused: re.Match[str]) -> Finding | None:
    """Explains the refusal of a target; the fix also names the targets that preflight would refuse next."""
    lora = seen.plan.method.lora
    if seen.observed is None or lora is None or lora.target_modules != (ALL_LINEAR,):
        return None
    excluded = list(dict.fromkeys([*lora.exclude_modules, refused[1], *bypassed_linear(seen.base, seen.observed.uses)]))
    field = "spec.method.lora.excludeModules"
    return _conflict(seen, error, {field: excluded}, f"set {field}: [{', '.join(excluded)}]")


def _refused_class(seen: ModelInspection, _: Exception, refused: re.Match[str]) -> Finding | None:
    """Explains the refusal of targets of a class for which the method has no adapter."""
    method, kind = seen.plan.method, refused[1] or refused[2]
    if method.adapter is None:
        return None
    others = sorted({name.rpartition(".")[2] for name, module in _layers(seen) if type(module).__name__ != kind})
    field = f"{_SETTINGS}.{TARGETS}"
    lora = "set spec.method.type: LoRA, which adapts them, and remove spec.method.settings"
    return make_finding(
        "model-settings-conflict",
        field=field,
        value=_planned(seen.plan, field),
        message=f"it names modules of the class {kind}, and PEFT's {method.type.value} has no adapter for these",
        fix=f"{lora}, or name others in {field}: {', '.join(others)}" if others else lora,
        changes=None if others else {"spec.method.type": MethodType.LORA.value, _SETTINGS: None},
    )


def _refused_size(seen: ModelInspection, error: Exception, refused: re.Match[str]) -> Finding | None:
    """Explains a setting that does not fit the sizes of the model's layers."""
    method = seen.plan.method
    name = next((setting.name for setting in known_settings(method.type).values() if setting.peft_name == refused[1]), None)
    if method.adapter is None or name is None:
        return None
    divisor = math.gcd(*(size for _, layer in _layers(seen) for size in layer.weight.shape))
    wanted = f"a divisor of {divisor}" if refused.re is NOT_DIVISIBLE and divisor > 1 else "another number"
    if refused.re is BEYOND_LAYER:
        wanted = "a smaller number"
    field = f"{_SETTINGS}.{name}"
    return make_finding(
        "model-settings-conflict",
        field=field,
        value=_planned(seen.plan, field) + ("" if name in method.adapter.settings else " (the default)"),
        message=f"PEFT refuses it for the layers of this model: {error.__cause__}",
        fix=f"write {wanted}, or name in {_SETTINGS}.{TARGETS} only layers that it fits",
    )


def _layers(seen: ModelInspection) -> list[tuple[str, nn.Linear | Conv1D]]:
    """Returns the names and layers of all linear layers except the output head. PEFT may have adapted some before it failed."""
    head = seen.base.get_output_embeddings()
    return [
        (name.removesuffix(".base_layer"), layer)
        for name, layer in seen.base.named_modules()
        if isinstance(layer, nn.Linear | Conv1D) and layer is not head and ADAPTER not in name.split(".")
    ]


_ATTACHING: tuple[tuple[re.Pattern[str], Callable[[ModelInspection, Exception, re.Match[str]], Finding | None]], ...] = (
    (STACKED_WEIGHTS, _stacked_weights),
    (REFUSED_MODULE, _refused_module),
    (REFUSED_CLASS, _refused_class),
    (NOT_DIVISIBLE, _refused_size),
    (BEYOND_LAYER, _refused_size),
)
"""Error texts of PEFT, each with the function that makes a more helpful finding, or returns None if it has nothing to add."""

"""Turns errors of the libraries and of this trainer into findings. model/library_texts.py has the texts of the libraries."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class ExplainedError:
    """An error text of a library, and the function that makes a more helpful finding of it."""

    text: re.Pattern[str]
    finding: Callable[[ModelInspection, Exception, re.Match[str]], Finding | None]
    """Returns None if there is nothing to add."""


def loading_error(seen: ModelInspection, error: Exception) -> Finding:
    """Explains why the libraries do not build the model."""
    return _explained(_LOADING, seen, error) or finding_of_error(
        "model-not-accepted", "spec.model.source", seen.directory.name, error
    )


def attaching_error(seen: ModelInspection, error: TrainerError) -> Finding:
    """Explains why this model cannot be trained with these settings."""
    return _explained(_ATTACHING, seen, error) or _conflict(seen, error)


def finding_of_error(
    identifier: str, field: str, value: str, error: Exception, *, changes: Mapping[str, Any] | None = None, fix: str = ""
) -> Finding:
    """Makes a finding of an error: the trainer's own with their hint, a library's with the name of its class."""
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


def _explained(table: tuple[ExplainedError, ...], seen: ModelInspection, error: Exception) -> Finding | None:
    for row in table:
        match = row.text.search(str(error))
        finding = row.finding(seen, error, match) if match is not None else None
        if finding is not None:
            return finding
    return None


def _conflict(seen: ModelInspection, error: Exception, changes: Mapping[str, Any] | None = None, fix: str = "") -> Finding:
    field = _named_field(error) or "spec.method.type"
    return finding_of_error("model-settings-conflict", field, _planned(seen.plan, field), error, changes=changes, fix=fix)


def _planned(plan: RunPlan, field: str) -> str:
    """Returns the plan's value of a field of the spec, as a manifest writes it."""
    adapter = plan.method.adapter
    if field.startswith(_SETTINGS) and adapter is not None:
        name = field.removeprefix(_SETTINGS).removeprefix(".")
        # Not every method has every setting that an error names.
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


def _named_field(error: Exception) -> str | None:
    """Returns the field with which the trainer's own errors begin."""
    field, colon, _ = str(error).partition(":")
    return field if colon and field.startswith("spec.") else None


def _unknown_attention(seen: ModelInspection, error: Exception, _: re.Match[str]) -> Finding:
    field = "spec.model.attention"
    return make_finding(
        "attention-not-supported",
        field=field,
        value=seen.plan.model.attention.value,
        message=f"transformers has no such attention for this model: {str(error)[:300]}",
        fix=f"set {field}: eager",
        changes={field: "eager"},
    )


def _stacked_weights(seen: ModelInspection, error: Exception, _: re.Match[str]) -> Finding:
    """Proposes the settings with which PEFT's adapters of stacked weights work."""
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
    """Explains targets of a class that the method has no adapter for."""
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
    name = next((each.name for each in known_settings(method.type).values() if each.peft_name == refused[1]), None)
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
        fix=f"write {wanted}, or name only layers that it fits in {_SETTINGS}.{TARGETS}",
    )


def _layers(seen: ModelInspection) -> list[tuple[str, nn.Linear | Conv1D]]:
    """Returns the base's linear layers by name, except the output head; PEFT may have adapted some before it failed."""
    head = seen.base.get_output_embeddings()
    return [
        (name.removesuffix(".base_layer"), layer)
        for name, layer in seen.base.named_modules()
        if isinstance(layer, nn.Linear | Conv1D) and layer is not head and ADAPTER not in name.split(".")
    ]


_LOADING = (ExplainedError(UNKNOWN_ATTENTION, _unknown_attention),)
_ATTACHING = (
    ExplainedError(STACKED_WEIGHTS, _stacked_weights),
    ExplainedError(REFUSED_MODULE, _refused_module),
    ExplainedError(REFUSED_CLASS, _refused_class),
    ExplainedError(NOT_DIVISIBLE, _refused_size),
    ExplainedError(BEYOND_LAYER, _refused_size),
)

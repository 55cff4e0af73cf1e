"""Errors of the libraries and of this trainer -> findings. The texts of the libraries are in model/library_texts.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from finetune_job.api.method import ALL_LINEAR
from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_trainer.errors import TrainerError
from finetune_trainer.model.adapters import unfit_for_experts
from finetune_trainer.model.library_texts import REFUSED_MODULE, STACKED_WEIGHTS, UNKNOWN_ATTENTION
from finetune_trainer.preflight.bypassed import bypassed_linear
from finetune_trainer.preflight.model_inspection import ModelInspection


@dataclass(frozen=True)
class ExplainedError:
    """A text of a library, and the finding that says more than the text itself."""

    text: re.Pattern[str]
    finding: Callable[[ModelInspection, Exception, re.Match[str]], Finding | None]
    """None: nothing to add in this case."""


def loading_error(seen: ModelInspection, error: Exception) -> Finding:
    """Why the libraries do not build the model."""
    return _explained(_LOADING, seen, error) or finding_of_error(
        "model-not-accepted", "spec.model.source", seen.directory.name, error
    )


def attaching_error(seen: ModelInspection, error: TrainerError) -> Finding:
    """Why this model cannot be trained with these settings."""
    return _explained(_ATTACHING, seen, error) or _conflict(seen, error)


def finding_of_error(
    identifier: str, field: str, value: str, error: Exception, *, changes: Mapping[str, Any] | None = None, fix: str = ""
) -> Finding:
    """A finding that tells an error: of this trainer in its own words and with its hint, of a library with the class."""
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
        found = row.finding(seen, error, match) if match is not None else None
        if found is not None:
            return found
    return None


def _conflict(seen: ModelInspection, error: Exception, changes: Mapping[str, Any] | None = None, fix: str = "") -> Finding:
    field = _named_field(error) or "spec.method"
    return finding_of_error("model-settings-conflict", field, seen.plan.method.type.value, error, changes=changes, fix=fix)


def _named_field(error: Exception) -> str | None:
    """Our errors begin with the field that they are about."""
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
    """With the settings that PEFT's adapters of stacked weights work with."""
    return _conflict(seen, error, unfit_for_experts(seen.plan.method))


def _refused_module(seen: ModelInspection, error: Exception, refused: re.Match[str]) -> Finding | None:
    """The refusal of a target, with a fix that names, too, what preflight would refuse next."""
    lora = seen.plan.method.lora
    if seen.observed is None or lora is None or lora.target_modules != (ALL_LINEAR,):
        return None
    excluded = list(dict.fromkeys([*lora.exclude_modules, refused[1], *bypassed_linear(seen.base, seen.observed.uses)]))
    field = "spec.method.lora.excludeModules"
    return _conflict(seen, error, {field: excluded}, f"set {field}: [{', '.join(excluded)}]")


_LOADING = (ExplainedError(UNKNOWN_ATTENTION, _unknown_attention),)
_ATTACHING = (ExplainedError(STACKED_WEIGHTS, _stacked_weights), ExplainedError(REFUSED_MODULE, _refused_module))

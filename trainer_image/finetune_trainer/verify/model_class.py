"""Finds the class with which transformers must load a base so that PEFT can attach the adapters to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from finetune_job.failures import FailureClass
from finetune_job.methods import INSIDE_PEFT
from finetune_trainer.model.load import without_values
from finetune_trainer.verify.stored_weights import StoredWeights
from finetune_trainer.weights.errors import MergeError
from finetune_trainer.weights.headers import CONFIG_FILE, read_adapter, read_json

Build = Callable[..., PreTrainedModel]
"""Builds a model from a configuration and options. The model has no values."""


class UnverifiableModelError(MergeError):
    """The model's class cannot be verified in bounded memory. The merge may still be right."""

    failure = FailureClass.USER_MODEL


def config_of(directory: Path, *, allow_remote_code: bool = False) -> Any:
    """Return the configuration of the model in a directory, as the library reads it."""
    return AutoConfig.from_pretrained(directory, trust_remote_code=allow_remote_code, local_files_only=True)


def model_builder(base: Path, adapters: Sequence[Path] = (), *, allow_remote_code: bool = False) -> Build:
    """Return a function that builds the base with the class that has most of the adapters' modules.

    For a model of text and images, the class for text and the class for the whole model name modules differently, and PEFT
    silently skips adapters of the other class. The class for text is preferred. Raises UnverifiableModelError.
    """
    names = [name.removeprefix(INSIDE_PEFT) for adapter in adapters for name in read_adapter(adapter).tensors]
    try:
        config = config_of(base, allow_remote_code=allow_remote_code)
    except (ValueError, OSError, ImportError) as error:
        has_code = "auto_map" in read_json(base / CONFIG_FILE)
        reason = "its code (auto_map in config.json) is not run" if has_code else str(error).partition("\n")[0]
        raise _unverifiable(base, reason) from error
    stored = StoredWeights(base, None, adapters)
    reasons, best, most = [], None, 0
    for build in _builders(config, allow_remote_code=allow_remote_code):
        try:
            model = build(config)
        except ValueError as error:
            # The other lines list all classes that the library knows.
            reasons.append(str(error).partition("\n")[0])
            continue
        lacking = next((name for name, _ in model.named_parameters() if not stored.holds(name)), None)
        if lacking is not None:
            reasons.append(f"its files do not hold {lacking} of {type(model).__name__}")
            continue
        count = sum(_is_inside(model, name) for name in names)
        if count == len(names):
            return build
        if count > most:
            best, most = build, count
        reasons.append(f"{type(model).__name__} has no module for {names[0]}")
    if best is None:
        raise _unverifiable(base, "; ".join(dict.fromkeys(reasons)))
    return best


def _builders(config: Any, *, allow_remote_code: bool) -> Iterable[Build]:
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM

    def build(config: Any, **options: Any) -> Any:
        with without_values(allow_remote_code=allow_remote_code):
            return auto.from_config(config, trust_remote_code=allow_remote_code, **options)

    yield build
    for name in config.architectures or ():
        named: Any = getattr(transformers, name, None)
        is_class = isinstance(named, type) and issubclass(named, PreTrainedModel)
        if is_class and named.can_generate() and named.main_input_name == "input_ids":

            def build_named(config: Any, named: Any = named, **options: Any) -> Any:
                with without_values(allow_remote_code=False):
                    return named._from_config(config, **options)  # noqa: SLF001

            yield build_named


def _is_inside(model: nn.Module, name: str) -> bool:
    """Whether an adapter's tensor belongs to a module with parameters, and not just to a container of modules."""
    module = model
    for part in name.split("."):
        child = module._modules.get(part)  # noqa: SLF001
        if child is None:
            break
        module = child
    return bool(module._parameters)  # noqa: SLF001


def _unverifiable(base: Path, reason: str) -> UnverifiableModelError:
    return UnverifiableModelError(
        f"{base}: base and adapter cannot be loaded for a comparison with the merged model: {reason}",
        "give --no-verify to merge without this comparison",
    )

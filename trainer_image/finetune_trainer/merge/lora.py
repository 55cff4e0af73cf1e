"""Changes of the base model's parameters by one adapter of LoRA's family, trained rows of embeddings included.

In: the adapter's headers and settings, and where the base's parameters are stored. Out: an AdapterChanges, by the model's own
parameter paths. Every adapter tensor is used, or it is an error. This is for `peft_type` LORA; non_lora.py is for the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finetune_job.api.method import ALL_LINEAR
from finetune_trainer.merge.adapter_changes import (
    AdapterChanges,
    apply_to_tied_copies,
    follow_ties,
    module_of,
    require_all_targets,
    saved_parameters,
)
from finetune_trainer.merge.adapter_names import TOKENS_PART, ParsedAdapter, absent_in_base, parse_names
from finetune_trainer.merge.adapter_settings import AdapterHeaders, AdapterSettings, adapter_settings
from finetune_trainer.merge.changes import TokenRows
from finetune_trainer.merge.factors import LayerTensors, bias_change, check_shapes, convolution_changes, module_change
from finetune_trainer.merge.parameter_adapters import parameter_changes
from finetune_trainer.weights.errors import (
    AdapterTensorDuplicateError,
    AdapterTensorMisshapedError,
    AdapterTensorMissingError,
    AdapterTensorUnknownError,
    UnsupportedAdapterError,
)
from finetune_trainer.weights.headers import TensorHeader
from finetune_trainer.weights.stored import StoredModel, StoredParameter

Tokens = Mapping[str, TensorHeader]
"""Trained rows by module."""


def lora_changes(adapter: AdapterHeaders, model: StoredModel, base_config: Mapping[str, Any]) -> AdapterChanges:
    """Changes of an adapter. Raises UnsupportedAdapterError, UnsupportedBaseError and the AdapterTensor... errors, naming field
    or tensor.
    """
    return _Lora(adapter, model, str(base_config.get("model_type"))).changes()


class _Lora:
    """Turns one adapter into an AdapterChanges."""

    def __init__(self, adapter: AdapterHeaders, model: StoredModel, model_type: str) -> None:
        self._adapter = adapter
        self._model = model
        self._model_type = model_type
        self._settings = adapter_settings(adapter.config)
        self._result = AdapterChanges()

    def changes(self) -> AdapterChanges:
        """All changes of the adapter."""
        tensors = self._adapter.tensors
        on_parameters = parameter_changes(self._model, tensors, self._settings)
        self._result.matrices += on_parameters.changes
        parsed = parse_names({name: tensor for name, tensor in tensors.items() if name not in on_parameters.used})
        adapted = self._add_factors(parsed) | on_parameters.paths
        for (module, name), tensor in parsed.whole.items():
            self._add_whole(module, name, tensor)
        for (module, name), tensor in parsed.base_copies.items():
            self._add_base_copy(module, name, tensor)
        tokens = {module: tensor for module, tensor in parsed.tokens.items() if tensor.name not in self._adapter.copies}
        add_token_rows(tokens, self._model, self._settings, self._result)
        apply_to_tied_copies(self._adapter, self._model, self._result)
        require_all_targets(self._model, self._settings, adapted)
        return self._result

    def _add_factors(self, parsed: ParsedAdapter) -> set[str]:
        """Add the changes by factors; returns the paths of their weights."""
        adapted = set()
        for (module, depth), factors in parsed.factors.items():
            example = next(iter(factors.values())).name
            weight = self._parameter(f"{module}.weight", example)
            path = self._model.path(f"{module}.weight")
            self._require_target(module, depth, path, example)
            adapted.add(path)
            if all(tensor.name in self._adapter.copies for tensor in factors.values()):
                continue
            if len(weight.shape) > 2:
                self._add_convolution(module, factors)
                continue
            self._result.add(path, module_change(module, factors, weight, self._settings, self._model_type))
            bias = bias_change(module, factors, self._model.parameter(f"{module}.bias"), self._settings)
            if bias is not None:
                self._result.add(self._model.path(f"{module}.bias"), bias)
        return adapted

    def _require_target(self, module: str, depth: int, path: str, example: str) -> None:
        """Refuse tensors of modules that adapter_config.json does not target, which PEFT silently drops when it loads the
        file.
        """
        settings = self._settings
        if depth == 0:
            names = {module, module_of(path)}
            if settings.target_modules == ALL_LINEAR or any(settings.targets(name) for name in names):
                return
            tie = self._model.tie(path)
            if settings.ties_embeddings and tie is not None and settings.targets(module_of(tie.paths[0])):
                return
        raise AdapterTensorUnknownError(
            f"adapter tensor {example}: adapter_config.json has no target_modules or target_parameters that cover it. The "
            "file and its configuration belong to different adapters."
        )

    def _parameter(self, path: str, example: str) -> StoredParameter:
        parameter = self._model.parameter(path)
        if parameter is None:
            raise absent_in_base(example, path)
        return parameter

    def _add_convolution(self, module: str, factors: LayerTensors) -> None:
        parameters = {name: self._model.parameter(f"{module}.{name}") for name in ("weight", "bias")}
        base = {name: parameter.parts[0].header for name, parameter in parameters.items() if parameter is not None}
        for name, change in convolution_changes(module, factors, base, self._settings, self._adapter.config).items():
            self._result.add(self._model.path(f"{module}.{name}"), change)

    def _add_whole(self, module: str, name: str, tensor: TensorHeader) -> None:
        """Add a parameter of a module that was trained whole."""
        path = self._whole_path(module, name, tensor, is_base_copy=False)
        if tensor.name in self._adapter.copies:
            return
        if path in self._result.changes:
            raise AdapterTensorDuplicateError(
                f"adapter tensors {tensor.name} and factors of {module} both change {path}. Save the adapter again."
            )
        self._replace(path, tensor)
        # If sizes differ, tied parameters can have no other value.
        if self._model.num_rows is not None and path in self._model.embeddings and not self._settings.is_saved_whole(module):
            follow_ties(path, tensor, self._model, saved_parameters(self._adapter, self._model), self._result)

    def _add_base_copy(self, module: str, name: str, tensor: TensorHeader) -> None:
        """Add a base copy, which PEFT loads into the base model itself, and so into every parameter that shares its memory."""
        path = self._whole_path(module, name, tensor, is_base_copy=True)
        if tensor.name in self._adapter.copies:
            return
        tie = self._model.tie(path)
        if tie is None:
            self._replace(path, tensor)
        for other in tie.paths if tie else ():
            if other == path or other not in self._result.replacements:
                self._result.replacements[other] = tensor
        if not self._is_trained_bias(module, name):
            self._result.base_copies.update(other for other in (tie.paths if tie else (path,)) if self._holds(other, tensor))

    def _holds(self, path: str, tensor: TensorHeader) -> bool:
        return self._result.replacements[path] is tensor

    def _replace(self, path: str, tensor: TensorHeader) -> None:
        first = self._result.replacements.setdefault(path, tensor)
        if first is not tensor:
            raise AdapterTensorDuplicateError(
                f"adapter tensors {first.name} and {tensor.name} both replace {path}. Save the adapter again."
            )

    def _is_trained_bias(self, module: str, name: str) -> bool:
        bias = self._settings.bias
        return name == "bias" and (bias == "all" or (bias == "lora_only" and self._settings.targets(module)))

    def _whole_path(self, module: str, name: str, tensor: TensorHeader, *, is_base_copy: bool) -> str:
        """Path of the tensor's parameter, after checking that the adapter may hold it and that it fits."""
        parameter = self._parameter(f"{module}.{name}", tensor.name)
        # PEFT saves them whole although the configuration does not name them, if the vocabulary was resized in training.
        is_embedding = self._model.path(f"{module}.{name}") in self._model.embeddings or (is_base_copy and name == "weight")
        if not (self._is_trained_bias(module, name) or is_embedding or self._settings.is_saved_whole(module)):
            raise AdapterTensorUnknownError(
                f"adapter tensor {tensor.name}: adapter_config.json does not say that {module}.{name} is trained "
                "(modules_to_save, bias). The file and its configuration belong to different adapters."
            )
        if tensor.shape != parameter.shape:
            raise AdapterTensorMisshapedError(
                f"adapter tensor {tensor.name}: shape {list(tensor.shape)} does not fit {parameter.parts[0].header.name} of "
                f"shape {list(parameter.shape)}. The adapter was trained on another model or revision; give that one as the base."
            )
        check_shapes({name: tensor}, {name: parameter.shape}, parameter.path)
        return self._model.path(f"{module}.{name}")


def add_token_rows(tokens: Tokens, model: StoredModel, settings: AdapterSettings, result: AdapterChanges) -> None:
    """Add trained rows. A parameter tied to the input embeddings gets their rows, unless it has rows of its own.

    Raises UnsupportedAdapterError and the AdapterTensor... errors.
    """
    for module, tensor in tokens.items():
        path, rows = _rows(module, tensor, model, settings)
        tie = model.tie(path)
        followers = [other for other in tie.paths[1:] if module_of(other) not in tokens] if tie and path == tie.paths[0] else []
        for owner in (path, *followers):
            if owner in result.changes or (owner in result.replacements and owner not in result.base_copies):
                raise UnsupportedAdapterError(
                    f"adapter tensor {tensor.name}: trainable_token_indices and another part of the adapter both change {owner}, "
                    "which PEFT does not define. Train either the rows or the whole matrix, or publish the adapter alone "
                    "(merge.enabled: false)."
                )
            result.add(owner, rows)
    _require_all(tokens, model, settings)


def _rows(module: str, tensor: TensorHeader, model: StoredModel, settings: AdapterSettings) -> tuple[str, TokenRows]:
    weight, path = model.parameter(f"{module}.weight"), model.path(f"{module}.weight")
    indices = settings.tokens_of(module, path in model.family.ties.values())
    if indices is None or weight is None:
        missing = "the base model has no" if weight is None else "adapter_config.json has no trainable_token_indices for"
        raise AdapterTensorUnknownError(
            f"adapter tensor {tensor.name}: {missing} {module}. The file belongs to another configuration or base model."
        )
    check_shapes({"": tensor}, {"": (len(indices), *weight.shape[1:])}, f"{len(indices)} trained rows of {weight.path}")
    for index in indices:
        if not 0 <= index < weight.shape[0]:
            raise AdapterTensorMisshapedError(
                f"adapter tensor {tensor.name}: trainable_token_indices holds {index}, but {weight.path} has {weight.shape[0]} "
                "rows. If the vocabulary was resized in training, save the adapter with save_embedding_layers=True."
            )
    return path, TokenRows(indices, tensor)


def _require_all(tokens: Tokens, model: StoredModel, settings: AdapterSettings) -> None:
    if settings.token_indices is None:
        return
    if not isinstance(settings.token_indices, Mapping):
        if not tokens:
            raise _missing("the input embeddings")
        return
    tied = {path: tie.paths[0] for tie in model.ties for path in tie.paths}
    for name, indices in settings.token_indices.items():
        if any(module.endswith(name) for module in tokens):
            continue
        # PEFT writes tied rows with the same indices only once.
        sources = {module_of(tied[path]) for path in tied if module_of(path).endswith(name)}
        if not any(source in tokens and settings.tokens_of(source, is_input_embedding=True) == indices for source in sources):
            raise _missing(name)


def _missing(where: str) -> AdapterTensorMissingError:
    return AdapterTensorMissingError(
        f"the adapter holds no {TOKENS_PART} for {where}, although adapter_config.json has trainable_token_indices there: the "
        "adapter was saved incompletely. Save it again from all ranks."
    )

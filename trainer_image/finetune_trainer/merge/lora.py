"""Finds the changes that one adapter of the LoRA family makes to the base's parameters, including trained embedding rows.

It needs the adapter's headers and settings, and the places where the base's parameters are stored. An unused adapter tensor is an
error. This module handles the `peft_type` LORA; non_lora.py handles the others.
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
    token_rows,
)
from finetune_trainer.merge.adapter_names import TOKENS_PART, absent_in_base, parse_names
from finetune_trainer.merge.adapter_settings import AdapterHeaders, AdapterSettings, adapter_settings
from finetune_trainer.merge.factors import LayerTensors, bias_change, check_shapes, convolution_changes, module_change
from finetune_trainer.merge.parameter_adapters import parameter_changes
from finetune_trainer.weights.errors import AdapterTensorError, UnsupportedAdapterError
from finetune_trainer.weights.headers import TensorHeader
from finetune_trainer.weights.stored import StoredModel, StoredParameter


def lora_changes(adapter: AdapterHeaders, model: StoredModel, base_config: Mapping[str, Any]) -> AdapterChanges:
    """Return the changes that an adapter makes.

    Raises UnsupportedAdapterError, UnsupportedBaseError and AdapterTensorError, which name the field or the tensor.
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
        """Return all changes that the adapter makes."""
        tensors = self._adapter.tensors
        on_parameters = parameter_changes(self._model, tensors, self._settings)
        self._result.matrices += on_parameters.changes
        parsed = parse_names({name: tensor for name, tensor in tensors.items() if name not in on_parameters.used})
        adapted = {self._add_factors(*key, factors) for key, factors in parsed.factors.items()} | on_parameters.paths
        for (module, name), tensor in parsed.whole.items():
            self._add_whole(module, name, tensor)
        for (module, name), tensor in parsed.base_copies.items():
            self._add_base_copy(module, name, tensor)
        tokens = {module: tensor for module, tensor in parsed.tokens.items() if tensor.name not in self._adapter.copies}
        self._add_token_rows(tokens)
        _require_all_rows_trained(tokens, self._model, self._settings)
        apply_to_tied_copies(self._adapter, self._model, self._result)
        require_all_targets(self._model, self._settings, adapted)
        return self._result

    def _add_factors(self, module: str, depth: int, factors: LayerTensors) -> str:
        """Add the changes that the factors of one module make. Return the path of the module's weight."""
        settings, example = self._settings, next(iter(factors.values())).name
        weight, path = self._parameter(f"{module}.weight", example), self._model.path(f"{module}.weight")
        tie = self._model.tie(path)
        is_target = depth == 0 and (
            settings.target_modules == ALL_LINEAR
            or any(settings.targets(name) for name in (module, module_of(path)))
            or (settings.ties_embeddings and tie is not None and settings.targets(module_of(tie.paths[0])))
        )
        if not is_target:  # PEFT silently drops such tensors when it loads the file
            raise AdapterTensorError(
                f"adapter tensor {example}: adapter_config.json has no target_modules or target_parameters that cover it. The "
                "file and its configuration belong to different adapters."
            )
        if all(tensor.name in self._adapter.copies for tensor in factors.values()):
            return path
        bias = self._model.parameter(f"{module}.bias")
        if len(weight.shape) > 2:
            base = {"weight": weight.parts[0].header} | ({"bias": bias.parts[0].header} if bias is not None else {})
            for name, change in convolution_changes(module, factors, base, settings, self._adapter.config).items():
                self._result.add(self._model.path(f"{module}.{name}"), change)
            return path
        self._result.add(path, module_change(module, factors, weight, settings, self._model_type))
        addition = bias_change(module, factors, bias, settings)
        if addition is not None:
            self._result.add(self._model.path(f"{module}.bias"), addition)
        return path

    def _parameter(self, path: str, example: str) -> StoredParameter:
        parameter = self._model.parameter(path)
        if parameter is None:
            raise absent_in_base(example, path)
        return parameter

    def _add_whole(self, module: str, name: str, tensor: TensorHeader) -> None:
        """Replace a parameter that the adapter stores whole."""
        path = self._whole_path(module, name, tensor, is_base_copy=False)
        if tensor.name in self._adapter.copies:
            return
        if path in self._result.changes:
            raise AdapterTensorError(
                f"adapter tensors {tensor.name} and factors of {module} both change {path}. Save the adapter again."
            )
        self._result.replace(path, tensor)
        # The base stores fewer rows than a resized embedding has, so parameters tied to it can only have this tensor's values.
        if self._model.num_rows is not None and path in self._model.embeddings and not self._settings.is_saved_whole(module):
            follow_ties(path, tensor, self._model, saved_parameters(self._adapter, self._model), self._result)

    def _add_base_copy(self, module: str, name: str, tensor: TensorHeader) -> None:
        """Add a copied base parameter. PEFT loads it into the base itself, and so into every parameter that shares its memory."""
        path = self._whole_path(module, name, tensor, is_base_copy=True)
        if tensor.name in self._adapter.copies:
            return
        tie, replacements = self._model.tie(path), self._result.replacements
        if tie is None:
            self._result.replace(path, tensor)
        for other in tie.paths if tie else ():
            if other == path or other not in replacements:
                replacements[other] = tensor
        if not self._is_trained_bias(module, name):
            self._result.base_copies.update(other for other in (tie.paths if tie else (path,)) if replacements[other] is tensor)

    def _is_trained_bias(self, module: str, name: str) -> bool:
        bias = self._settings.bias
        return name == "bias" and (bias == "all" or (bias == "lora_only" and self._settings.targets(module)))

    def _whole_path(self, module: str, name: str, tensor: TensorHeader, *, is_base_copy: bool) -> str:
        """Return the path of the tensor's parameter. Check the shape, and that the adapter may hold this parameter."""
        parameter, path = self._parameter(f"{module}.{name}", tensor.name), self._model.path(f"{module}.{name}")
        # If the vocabulary was resized in training, PEFT saves embeddings whole although the configuration does not name them.
        is_embedding = path in self._model.embeddings or (is_base_copy and name == "weight")
        if not (self._is_trained_bias(module, name) or is_embedding or self._settings.is_saved_whole(module)):
            raise AdapterTensorError(
                f"adapter tensor {tensor.name}: adapter_config.json does not say that {module}.{name} is trained "
                "(modules_to_save, bias). The file and its configuration belong to different adapters."
            )
        check_shapes({name: tensor}, {name: parameter.shape}, parameter.parts[0].header.name)
        return path

    def _add_token_rows(self, tokens: Mapping[str, TensorHeader]) -> None:
        """Add the trained rows of modules. A parameter tied to the input embeddings gets the same rows unless it has its own."""
        model, result = self._model, self._result
        for module, tensor in tokens.items():
            weight, path = model.parameter(f"{module}.weight"), model.path(f"{module}.weight")
            indices = self._settings.tokens_of(module, path in model.family.ties.values())
            if indices is None or weight is None:
                missing = "the base model has no" if weight is None else "adapter_config.json has no trainable_token_indices for"
                raise AdapterTensorError(
                    f"adapter tensor {tensor.name}: {missing} {module}. The file belongs to another configuration or base model."
                )
            rows = token_rows(tensor, indices, weight, "trainable_token_indices")
            tie = model.tie(path)
            others = tie.paths[1:] if tie and path == tie.paths[0] else ()
            for owner in (path, *(other for other in others if module_of(other) not in tokens)):
                if owner in result.changes or (owner in result.replacements and owner not in result.base_copies):
                    raise UnsupportedAdapterError(
                        f"adapter tensor {tensor.name}: trainable_token_indices and another part of the adapter both change "
                        f"{owner}, and PEFT does not define the result. Train either the rows or the whole matrix, or publish "
                        "the adapter alone (merge.enabled: false)."
                    )
                result.add(owner, rows)


def _require_all_rows_trained(tokens: Mapping[str, TensorHeader], model: StoredModel, settings: AdapterSettings) -> None:
    """Raise AdapterTensorError if the adapter lacks rows that `trainable_token_indices` names. tokens: trained rows by module."""
    trained = settings.token_indices
    named = trained if isinstance(trained, Mapping) else {}
    lacking = "the input embeddings" if isinstance(trained, tuple) and not tokens else None
    tied = {path: tie.paths[0] for tie in model.ties for path in tie.paths}
    for name, indices in named.items():
        # PEFT writes tied rows with the same indices only once, so the file may hold them only for the first tied module.
        sources = {module_of(tied[path]) for path in tied if module_of(path).endswith(name)}
        is_tied = any(source in tokens and settings.tokens_of(source, is_input_embedding=True) == indices for source in sources)
        if not is_tied and not any(module.endswith(name) for module in tokens):
            lacking = name
            break
    if lacking is not None:
        raise AdapterTensorError(
            f"the adapter holds no {TOKENS_PART} for {lacking}, although adapter_config.json has trainable_token_indices there: "
            "the adapter was saved incompletely. Save it again from all ranks."
        )

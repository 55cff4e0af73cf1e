"""Trained rows of embeddings (trainable_token_indices) -> changes of the embeddings and of what is tied to them.

Source of the rules: peft 0.21.2, utils/other.py, set_additional_trainable_modules.
"""

from __future__ import annotations

from collections.abc import Mapping

from finetune_trainer.merge.adapter_changes import AdapterChanges, module_of
from finetune_trainer.merge.adapter_names import TOKENS_PART
from finetune_trainer.merge.adapter_settings import AdapterSettings
from finetune_trainer.merge.changes import TokenRows
from finetune_trainer.merge.factors import check_shapes
from finetune_trainer.weights.errors import (
    AdapterTensorMisshapedError,
    AdapterTensorMissingError,
    AdapterTensorUnknownError,
    UnsupportedAdapterError,
)
from finetune_trainer.weights.headers import TensorHeader
from finetune_trainer.weights.stored import StoredModel

Tokens = Mapping[str, TensorHeader]
"""Trained rows by module."""


def add_token_rows(tokens: Tokens, model: StoredModel, settings: AdapterSettings, result: AdapterChanges) -> None:
    """What is tied to the input embeddings follows their rows, unless it has rows of its own.

    Raises UnsupportedAdapterError and the AdapterTensor... errors.
    """
    for module, tensor in tokens.items():
        path, rows = _rows(module, tensor, model, settings)
        tie = model.tie(path)
        followers = [other for other in tie.paths[1:] if module_of(other) not in tokens] if tie and path == tie.paths[0] else []
        for owner in (path, *followers):
            if owner in result.changes or owner in result.replacements:
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
                "rows. If the vocabulary was resized in training, give the resized model as the base."
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
        # PEFT writes what is tied and has the same indices only once.
        sources = {module_of(tied[path]) for path in tied if module_of(path).endswith(name)}
        if not any(source in tokens and settings.tokens_of(source, is_input_embedding=True) == indices for source in sources):
            raise _missing(name)


def _missing(where: str) -> AdapterTensorMissingError:
    return AdapterTensorMissingError(
        f"the adapter holds no {TOKENS_PART} for {where}, although adapter_config.json has trainable_token_indices there: the "
        "adapter was saved incompletely. Save it again from all ranks."
    )

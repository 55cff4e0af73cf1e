"""Changes of the base model's parameters by one adapter, and checks that all methods share.

An adapter that was trained after resize_token_embeddings holds all rows of the embeddings, more than the base has. The plan is
then made for a model with as many rows (`with_saved_vocabulary`).

lora.py and non_lora.py fill an AdapterChanges; resolve_changes.py combines those of several adapters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from finetune_job.api.method import ALL_LINEAR
from finetune_job.methods import INSIDE_PEFT
from finetune_trainer.merge.adapter_names import whole_parameter
from finetune_trainer.merge.adapter_settings import AdapterHeaders, AdapterSettings
from finetune_trainer.merge.changes import Change
from finetune_trainer.merge.parameter_adapters import MatrixChange
from finetune_trainer.weights.errors import AdapterTensorMisshapedError, AdapterTensorMissingError, UnsupportedBaseError
from finetune_trainer.weights.headers import TensorHeader
from finetune_trainer.weights.stored import StoredModel

MAX_ROWS = 1 << 20
"""Largest number of rows of enlarged embeddings. XLM-V, the largest vocabulary of a published model, has 901,629."""
_VOCABULARY_BUFFER = "final_logits_bias"
"""Buffer with a value for each token, which is resized with the embeddings (Bart and its relatives), but which no adapter
holds.
"""


@dataclass
class AdapterChanges:
    """Changes and replacements by the model's own parameter paths."""

    changes: dict[str, list[Change]] = field(default_factory=dict)
    replacements: dict[str, TensorHeader] = field(default_factory=dict)
    """The adapter's tensors that replace parameters, before the changes."""
    base_copies: set[str] = field(default_factory=set)
    """Paths whose replacement was not trained: it is a copy of the base's values in training."""
    matrices: list[MatrixChange] = field(default_factory=list)
    """Changes of single stored matrices: adapters on parameters that several stored tensors hold."""

    def add(self, path: str, change: Change) -> None:
        self.changes.setdefault(path, []).append(change)


def module_of(path: str) -> str:
    """The module that holds a parameter."""
    return path.rpartition(".")[0]


def with_saved_vocabulary(model: StoredModel, adapters: Sequence[Mapping[str, TensorHeader]]) -> StoredModel:
    """The model with embeddings as large as in the adapters' files; the same model if that is their size.

    adapters: tensors by name. Looks at shapes only. Raises AdapterTensorMisshapedError if the embeddings were made smaller or too
    large, or are of several sizes, and UnsupportedBaseError.
    """
    stored, embeddings = model.vocabulary(), model.embeddings
    saved: dict[str, TensorHeader] = {}
    for tensors in adapters:
        for name, tensor in tensors.items():
            whole_path = whole_parameter(name)
            path = None if whole_path is None else model.path(whole_path)
            parameter = model.parameter(path) if path is not None and path in embeddings else None
            if parameter is None or parameter.path not in stored or tensor.shape[1:] != parameter.shape[1:] or not tensor.shape:
                continue
            _require_larger(tensor, parameter.shape[0])
            saved.setdefault(parameter.path, tensor)
            first = next(iter(saved.values()))
            if tensor.shape[0] != first.shape[0]:
                raise AdapterTensorMisshapedError(
                    f"adapter tensor {tensor.name}: has {tensor.shape[0]} rows, but {first.name} has {first.shape[0]}. All that "
                    "has a row for each token must have as many: call resize_token_embeddings once, before PEFT, and train again."
                )
    num_rows = next((tensor.shape[0] for tensor in saved.values()), 0)
    if all(parameter.shape[0] == num_rows for path, parameter in stored.items() if path in saved):
        return model
    if any(path.rpartition(".")[2] == _VOCABULARY_BUFFER for path in model.parameters):
        raise UnsupportedBaseError(
            f"the adapter has embeddings of {num_rows} rows, and the base model a {_VOCABULARY_BUFFER}, whose values for the "
            "added tokens no adapter holds. Give the resized model, saved before the training, as the base."
        )
    return model.with_vocabulary(num_rows, saved)


def _require_larger(tensor: TensorHeader, num_stored: int) -> None:
    num_rows = tensor.shape[0]
    if num_rows < num_stored:
        raise AdapterTensorMisshapedError(
            f"adapter tensor {tensor.name}: has {num_rows} rows, the base model has {num_stored}: the vocabulary was made "
            "smaller in training. Many models have more rows than their tokenizer has tokens, and "
            "resize_token_embeddings(len(tokenizer)) cuts these off. Call it only if len(tokenizer) is more than "
            f"{num_stored}, and train again; or give the model that was made smaller as the base."
        )
    if num_rows > max(MAX_ROWS, num_stored):
        raise AdapterTensorMisshapedError(
            f"adapter tensor {tensor.name}: has {num_rows} rows, one for each token; at most {MAX_ROWS} are merged. Resize the "
            "embeddings to the number of tokens that the tokenizer has."
        )


def follow_ties(path: str, tensor: TensorHeader, model: StoredModel, saved: Collection[str], result: AdapterChanges) -> None:
    """Load a tensor that PEFT loads into the base model into every parameter that shares its memory.

    path: of the parameter that `tensor` is loaded into. saved: paths of which the adapter's file has all values.
    """
    tie = model.tie(path)
    for other in tie.paths if tie else ():
        if other != path and other not in saved:
            result.replacements.setdefault(other, tensor)


def saved_parameters(adapter: AdapterHeaders, model: StoredModel) -> frozenset[str]:
    """Paths of the embeddings of which the adapter's file has all values."""
    saved = {path for name in adapter.tensors if (path := whole_parameter(name)) is not None}
    return model.embeddings & {model.path(path) for path in saved}


def require_all_rows(model: StoredModel, replaced: Collection[str]) -> None:
    """Check that with a resized vocabulary the adapter has everything with a row for each token.

    replaced: paths of the parameters that it replaces. Raises AdapterTensorMissingError naming a missing one.
    """
    if model.num_rows is None:
        return
    needed = [*model.vocabulary(), *(path for tie in model.ties for path in tie.paths if path in model.embeddings)]
    missing = next((path for path in needed if path not in replaced), None)
    if missing is not None:
        raise AdapterTensorMissingError(
            f"the adapter's file has embeddings of {model.num_rows} rows, more than the base model, but not all rows of "
            f"{missing}, which grew with them in training. Add {module_of(missing)} to modules_to_save and train again; where "
            "the adapter targets neither input nor output embeddings, saving it again with save_embedding_layers=True is enough."
        )


def apply_to_tied_copies(adapter: AdapterHeaders, model: StoredModel, result: AdapterChanges) -> None:
    """Change parameters that are tied to the input embeddings, and were trained as one with them, in the same way."""
    for tie in model.ties:
        first, *others = tie.paths
        for path in others:
            if any(name.startswith(f"{INSIDE_PEFT}{module_of(path)}.") for name in adapter.copies):
                if first in result.changes:
                    result.changes[path] = list(result.changes[first])
                if first in result.replacements:
                    result.replacements[path] = result.replacements[first]


def require_all_targets(model: StoredModel, settings: AdapterSettings, adapted: set[str]) -> None:
    """Check that each target has adapter tensors; otherwise the save lost some (a rank's part under FSDP, say).

    adapted: paths of the weights that the adapter changes. Raises AdapterTensorMissingError naming the module.
    """
    if settings.target_modules == ALL_LINEAR:
        return
    dimensions = {path: len(parameter.shape) for path, parameter in model.parameters.items()}
    dimensions |= {path: 2 for tie in model.ties for path in tie.paths}
    for path, count in dimensions.items():
        module, _, name = path.rpartition(".")
        is_target = name == "weight" and count >= 2 and settings.targets(module)
        if is_target and path not in adapted and not model.is_extra(path):
            raise AdapterTensorMissingError(
                f"the adapter holds no tensor for {module}, although target_modules {settings.target_modules!r} covers it: the "
                "adapter was saved incompletely. Save it again from all ranks."
            )

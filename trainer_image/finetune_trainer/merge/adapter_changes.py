"""Defines the changes that one adapter makes to the base model's parameters, and the checks that all methods share.

An adapter that was trained after resize_token_embeddings holds more embedding rows than the base. `with_saved_vocabulary` then
enlarges the model before the merge is planned.

lora.py and non_lora.py fill an AdapterChanges; resolve_changes.py combines the changes of several adapters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from finetune_job.api.method import ALL_LINEAR
from finetune_job.methods import INSIDE_PEFT
from finetune_trainer.merge.adapter_names import whole_parameter
from finetune_trainer.merge.adapter_settings import AdapterHeaders, AdapterSettings
from finetune_trainer.merge.changes import Change, TokenRows
from finetune_trainer.merge.factors import check_shapes
from finetune_trainer.merge.parameter_adapters import MatrixChange
from finetune_trainer.weights.errors import AdapterTensorError, UnsupportedBaseError
from finetune_trainer.weights.headers import TensorHeader
from finetune_trainer.weights.stored import StoredModel, StoredParameter

MAX_ROWS = 1 << 20
"""Maximum number of rows of enlarged embeddings. The largest vocabulary of a published model, that of XLM-V, has 901,629."""
_VOCABULARY_BUFFER = "final_logits_bias"
"""Buffer with one value per token (Bart and its relatives). It is resized with the embeddings, but adapters do not store it."""


@dataclass
class AdapterChanges:
    """The parameters that one adapter changes or replaces. Keys are the model's own parameter paths."""

    changes: dict[str, list[Change]] = field(default_factory=dict)
    replacements: dict[str, TensorHeader] = field(default_factory=dict)
    """The adapter's tensors that replace parameters. They apply before the changes."""
    base_copies: set[str] = field(default_factory=set)
    """Paths of parameters whose replacement was not trained: it is a copy of the values that the base had in training."""
    matrices: list[MatrixChange] = field(default_factory=list)
    """Changes of single stored matrices, for parameters that can consist of several stored tensors."""

    def add(self, path: str, change: Change) -> None:
        self.changes.setdefault(path, []).append(change)

    def replace(self, path: str, tensor: TensorHeader) -> None:
        """Replace a parameter. Raises AdapterTensorError if another tensor already replaces it."""
        first = self.replacements.setdefault(path, tensor)
        if first is not tensor:
            raise AdapterTensorError(
                f"adapter tensors {first.name} and {tensor.name} both replace {path}. Save the adapter again."
            )


def module_of(path: str) -> str:
    """Return the path of the module that holds a parameter."""
    return path.rpartition(".")[0]


def with_saved_vocabulary(model: StoredModel, adapters: Sequence[Mapping[str, TensorHeader]]) -> StoredModel:
    """Return the model with its embeddings enlarged to their size in the adapters' files, or unchanged if they are no larger.

    adapters: each adapter's tensors by name; only shapes are compared. Raises UnsupportedBaseError, and AdapterTensorError if the
    embeddings were made smaller, are too large, or differ in size.
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
            num_rows, num_stored = tensor.shape[0], parameter.shape[0]
            if num_rows < num_stored:
                raise AdapterTensorError(
                    f"adapter tensor {tensor.name} has {num_rows} rows, the base model has {num_stored}: the vocabulary was "
                    "made smaller in training. Many models have more rows than their tokenizer has tokens, and "
                    "resize_token_embeddings(len(tokenizer)) removes the extra rows. Call it only if len(tokenizer) is more "
                    f"than {num_stored}, and train again; or use the smaller model as the base."
                )
            if num_rows > max(MAX_ROWS, num_stored):
                raise AdapterTensorError(
                    f"adapter tensor {tensor.name} has {num_rows} rows, one for each token; at most {MAX_ROWS} are supported. "
                    "Resize the embeddings to the number of tokens that the tokenizer has."
                )
            saved.setdefault(parameter.path, tensor)
            first = next(iter(saved.values()))
            if tensor.shape[0] != first.shape[0]:
                raise AdapterTensorError(
                    f"adapter tensor {tensor.name} has {tensor.shape[0]} rows, but {first.name} has {first.shape[0]}. Tensors "
                    "with a row for each token must have the same number of rows: call resize_token_embeddings once, before "
                    "get_peft_model, and train again."
                )
    num_rows = next((tensor.shape[0] for tensor in saved.values()), 0)
    if all(parameter.shape[0] == num_rows for path, parameter in stored.items() if path in saved):
        return model
    if any(path.rpartition(".")[2] == _VOCABULARY_BUFFER for path in model.parameters):
        raise UnsupportedBaseError(
            f"the adapter's embeddings have {num_rows} rows, and the base model has a {_VOCABULARY_BUFFER}, whose values for "
            "the added tokens are not in an adapter. Use the resized model, saved before the training, as the base."
        )
    return model.with_vocabulary(num_rows, saved)


def token_rows(tensor: TensorHeader, indices: tuple[int, ...], weight: StoredParameter, field_name: str) -> TokenRows:
    """Return a weight's trained rows. field_name: the adapter_config.json field with their indices. Raises AdapterTensorError."""
    check_shapes({"": tensor}, {"": (len(indices), *weight.shape[1:])}, f"the {len(indices)} {field_name} of {weight.path}")
    outside = next((index for index in indices if not 0 <= index < weight.shape[0]), None)
    if outside is not None:
        raise AdapterTensorError(
            f"adapter tensor {tensor.name}: {field_name} in adapter_config.json holds {outside}, but {weight.path} has "
            f"{weight.shape[0]} rows. Use the model that the adapter was trained on as the base, or, if its vocabulary was "
            "resized, save the adapter with save_embedding_layers=True."
        )
    return TokenRows(indices, tensor)


def follow_ties(path: str, tensor: TensorHeader, model: StoredModel, saved: Collection[str], result: AdapterChanges) -> None:
    """Also replace the parameters that are tied to `path`: PEFT loads `tensor` into the memory that they share.

    saved: paths of parameters that the adapter's file stores whole. They are not replaced.
    """
    tie = model.tie(path)
    for other in tie.paths if tie else ():
        if other != path and other not in saved:
            result.replacements.setdefault(other, tensor)


def saved_parameters(adapter: AdapterHeaders, model: StoredModel) -> frozenset[str]:
    """Return the paths of the embeddings that the adapter's file stores whole."""
    saved = {path for name in adapter.tensors if (path := whole_parameter(name)) is not None}
    return model.embeddings & {model.path(path) for path in saved}


def require_all_rows(model: StoredModel, replaced: Collection[str]) -> None:
    """If the vocabulary was resized, check that the adapters hold every parameter that has one row per token.

    replaced: paths of the parameters that the adapters replace. Raises AdapterTensorError, which names a missing parameter.
    """
    if model.num_rows is None:
        return
    needed = [*model.vocabulary(), *(path for tie in model.ties for path in tie.paths if path in model.embeddings)]
    missing = next((path for path in needed if path not in replaced), None)
    if missing is not None:
        raise AdapterTensorError(
            f"the adapter's file has embeddings of {model.num_rows} rows, more than the base model, but not all rows of "
            f"{missing}, which grew with them in training. Add {module_of(missing)} to modules_to_save and train again; if the "
            "adapter targets neither input nor output embeddings, it is enough to save it again with save_embedding_layers=True."
        )


def apply_to_tied_copies(adapter: AdapterHeaders, model: StoredModel, result: AdapterChanges) -> None:
    """Copy the changes of input embeddings to the parameters that are tied to them and were trained together with them."""
    for tie in model.ties:
        first, *others = tie.paths
        for path in others:
            if any(name.startswith(f"{INSIDE_PEFT}{module_of(path)}.") for name in adapter.copies):
                if first in result.changes:
                    result.changes[path] = list(result.changes[first])
                if first in result.replacements:
                    result.replacements[path] = result.replacements[first]


def require_all_targets(model: StoredModel, settings: AdapterSettings, adapted: set[str]) -> None:
    """Check that each target has adapter tensors. If not, the file was saved incompletely, for example by a single FSDP rank.

    adapted: paths of the weights that the adapter changes. Raises AdapterTensorError, which names the module.
    """
    if settings.target_modules == ALL_LINEAR:
        return
    dimensions = {path: len(parameter.shape) for path, parameter in model.parameters.items()}
    dimensions |= {path: 2 for tie in model.ties for path in tie.paths}
    for path, count in dimensions.items():
        module, _, name = path.rpartition(".")
        is_target = name == "weight" and count >= 2 and settings.targets(module)
        if is_target and path not in adapted and not model.is_extra(path):
            raise AdapterTensorError(
                f"the adapter holds no tensor for {module}, although target_modules {settings.target_modules!r} covers it: the "
                "adapter was saved incompletely. Save it again from all ranks."
            )

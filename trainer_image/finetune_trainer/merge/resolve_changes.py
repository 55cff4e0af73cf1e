"""Combined changes of all adapters for every stored tensor of the base model. An unused adapter tensor is an error.

The adapters follow one another, parameters that share memory stay together or are written apart
(docs/explanation/decisions/0010-tied-weights.md), and parameters become stored tensors. Called by plan.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from finetune_trainer.merge.adapter_changes import AdapterChanges, require_all_rows
from finetune_trainer.merge.adapter_settings import AdapterHeaders
from finetune_trainer.merge.changes import Change, LowRank, TokenRows
from finetune_trainer.merge.lora import lora_changes
from finetune_trainer.merge.non_lora import non_lora_changes
from finetune_trainer.weights.errors import TiedWeightsError, UnsupportedAdapterError
from finetune_trainer.weights.families import tie_settings, vocabulary_settings
from finetune_trainer.weights.headers import TensorHeader
from finetune_trainer.weights.stored import StoredModel, StoredParameter, StoredPart, Tie

LORA = "LORA"
"""`peft_type` of LoRA, rsLoRA and DoRA."""


@dataclass(frozen=True)
class ChangedTensor:
    """An output tensor that differs from its base tensor: the source of its values, and the changes of each of its matrices."""

    source: TensorHeader
    is_replaced: bool
    """Whether `source` is an adapter's tensor, or a part of one."""
    changes: tuple[tuple[Change, ...], ...]


@dataclass(frozen=True)
class ResolvedChanges:
    """Combined changes of the base model by all adapters."""

    changed: Mapping[str, ChangedTensor]
    """Changed tensors by the name of the output tensor."""
    added: Mapping[str, TensorHeader]
    """Output tensors that the base does not store -> the base tensor of which they would be a copy without the adapters."""
    config_changes: Mapping[str, Any] = field(default_factory=dict)
    """Changed fields of config.json."""


@dataclass
class ParameterEdit:
    """Changes of one parameter of the model by the adapters so far."""

    source: TensorHeader | None = None
    """The adapter's tensor that replaces the parameter, before the changes."""
    changes: list[tuple[tuple[str, int] | None, Change]] = field(default_factory=list)
    """Changes with the stored tensor and the matrix in it that each changes; None: every matrix."""
    source_adapter: int | None = None
    """Number of the adapter that trained `source`; None: it is a copy of the base."""
    last_adapter: int | None = None
    """Number of the last adapter that changed anything."""

    def is_like(self, other: ParameterEdit) -> bool:
        """Whether both make the same changes to the same values."""
        return (self.source, self.changes) == (other.source, other.changes)


@dataclass
class SeparatedTies:
    """Output tensors beyond those of the base."""

    added: dict[str, TensorHeader] = field(default_factory=dict)
    """The stored tensor with which each shares its values in the base."""
    sources: dict[str, str] = field(default_factory=dict)
    """The path of that tensor's parameter."""
    config_changes: dict[str, Any] = field(default_factory=dict)


def resolve_changes(model: StoredModel, base_config: Mapping[str, Any], adapters: Sequence[AdapterHeaders]) -> ResolvedChanges:
    """Combine the changes of all adapters. Raises the AdapterTensor... errors, TiedWeightsError or UnsupportedAdapterError."""
    methods = [str(adapter.config.get("peft_type")) for adapter in adapters]
    if len(adapters) > 1 and set(methods) != {LORA}:
        raise UnsupportedAdapterError(
            f"adapters of the methods {methods} cannot be merged in one go, because PEFT does not define it. Merge one, and the "
            "next with the result as its base."
        )
    edits: dict[str, ParameterEdit] = {}
    for number, adapter in enumerate(adapters):
        _chain_adapter(edits, number, _changes_of_adapter(adapter, model, base_config), model)
    require_all_rows(model, {path for path, edit in edits.items() if edit.source is not None})
    sizes = {} if model.num_rows is None else vocabulary_settings(base_config, model.num_rows)
    ties = separate_ties(edits, model, {**base_config, **sizes})
    changed: dict[str, ChangedTensor] = {}
    for path, edit in edits.items():
        parameter = model.parameters.get(path)
        if parameter is not None:
            for part in parameter.parts:
                changed[part.header.name] = _changed_part(edit, parameter, part)
    for path, base in ties.added.items():
        edit = edits.get(path, ParameterEdit())
        changed[path] = _changed_part(edit, model.parameters[ties.sources[path]], StoredPart(base))
    return ResolvedChanges(
        {name: one for name, one in changed.items() if one.is_replaced or any(one.changes)},
        ties.added,
        sizes | ties.config_changes,
    )


def _changes_of_adapter(adapter: AdapterHeaders, model: StoredModel, base_config: Mapping[str, Any]) -> AdapterChanges:
    if adapter.config.get("peft_type") == LORA:
        return lora_changes(adapter, model, base_config)
    return non_lora_changes(adapter, model, base_config)


def _chain_adapter(edits: dict[str, ParameterEdit], number: int, adapter: AdapterChanges, model: StoredModel) -> None:
    """Apply adapter `number` (from 0) after the earlier ones. Raises UnsupportedAdapterError if PEFT defines no result."""
    for path, tensor in adapter.replacements.items():
        edit = edits.setdefault(path, ParameterEdit())
        is_copy = path in adapter.base_copies
        before = edit.source_adapter if is_copy else edit.last_adapter
        if before is not None:
            raise _ambiguous(path, before, number, f"{tensor.name} would undo it")
        edit.source = tensor  # PEFT loads all adapters before it merges the first, so the last copy of the base counts
        if not is_copy:
            edit.source_adapter, edit.last_adapter = number, number
    placed_changes: list[tuple[str, tuple[str, int] | None, Change]] = []
    placed_changes += [(path, None, change) for path, changes in adapter.changes.items() for change in changes]
    for matrix in adapter.matrices:
        owner = model.owner(matrix.stored.name)
        if owner is not None:
            placed_changes.append((owner[0].path, (matrix.stored.name, matrix.matrix), matrix.change))
    for path, place, change in placed_changes:
        edit = edits.setdefault(path, ParameterEdit())
        if edit.source_adapter not in (None, number):
            raise _ambiguous(path, edit.source_adapter, number, "the second was trained on other weights")
        if edit.last_adapter not in (None, number):
            if isinstance(change, LowRank) and change.magnitude is not None:
                raise _ambiguous(path, edit.last_adapter, number, "DoRA's norms are those of the weights that it was trained on")
            _require_other_tokens(path, edit, change)
        edit.changes.append((place, change))
        edit.last_adapter = number


def _require_other_tokens(path: str, edit: ParameterEdit, change: Change) -> None:
    taken = {index for _, earlier in edit.changes if isinstance(earlier, TokenRows) for index in earlier.indices}
    both = taken & set(change.indices) if isinstance(change, TokenRows) else ()
    if both:
        raise UnsupportedAdapterError(
            f"several adapters have trained row {min(both)} of {path} (trainable_token_indices), of which only one can be kept. "
            "Leave out one of the adapters."
        )


def _ambiguous(path: str, first: int | None, second: int, reason: str) -> UnsupportedAdapterError:
    return UnsupportedAdapterError(
        f"adapters {(first or 0) + 1} and {second + 1} both change {path}, and PEFT does not define what the two make together: "
        f"{reason}. Leave out one of them; or, if the second was trained on the first's merged model, merge them one after the "
        "other."
    )


def _changed_part(edit: ParameterEdit, parameter: StoredParameter, part: StoredPart) -> ChangedTensor:
    """The edits of a parameter for one of its stored tensors."""
    base = part.header
    num_matrices = base.shape[0] if any(place for place, _ in edit.changes) and len(base.shape) == 3 else 1
    matrices = tuple(
        tuple(change for place, change in edit.changes if place in (None, (base.name, matrix))) for matrix in range(num_matrices)
    )
    source = base if edit.source is None else _slice(edit.source, parameter, part)
    return ChangedTensor(source, edit.source is not None, matrices if any(matrices) else ())


def _slice(tensor: TensorHeader, parameter: StoredParameter, part: StoredPart) -> TensorHeader:
    """The stored part's place in a tensor that holds the whole parameter: consecutive rows of one expert."""
    if part.expert is None:
        return tensor
    rows, width = parameter.shape[1], tensor.num_bytes // (parameter.shape[0] * parameter.shape[1])
    offset = tensor.offset + (part.expert * rows + part.first_row) * width
    return TensorHeader(tensor.name, tensor.dtype, part.header.shape, tensor.file, offset)


def separate_ties(edits: Mapping[str, ParameterEdit], model: StoredModel, config: Mapping[str, Any]) -> SeparatedTies:
    """Decide for each tie whether it holds. Raises TiedWeightsError if its parameters cannot be written separately."""
    result = SeparatedTies()
    for tie in model.ties:
        edits_of_tie = [edits.get(path, ParameterEdit()) for path in tie.paths]
        if all(edit.is_like(edits_of_tie[0]) for edit in edits_of_tie):
            continue
        _require_separable(tie, edits, model, config)
        for path in tie.paths:
            if path not in tie.stored:
                result.added[path] = model.parameters[tie.source].parts[0].header
                result.sources[path] = tie.source
        result.config_changes |= tie_settings(config, is_tied=False)
    return result


def _require_separable(tie: Tie, edits: Mapping[str, ParameterEdit], model: StoredModel, config: Mapping[str, Any]) -> None:
    """Raise TiedWeightsError unless config.json can separate the tie, which works only for a decoder's input and output
    embeddings.
    """
    if len(tie.paths) == 2 and not model.family.always_tied and not config.get("is_encoder_decoder"):
        return
    changed = sorted(path for path in tie.paths if path in edits)
    reason = (
        "transformers ties parameters of this model type whatever config.json says"
        if model.family.always_tied
        else "config.json cannot say of these that they are separate"
    )
    raise TiedWeightsError(
        f"the adapter changes {', '.join(changed)} and not in the same way the others of {', '.join(tie.paths)}, which share "
        f"their memory: {reason}, so the merged model could not be written right. Drop these modules from target_modules, "
        "modules_to_save and trainable_token_indices, or train all of them alike with ensure_weight_tying: true."
    )

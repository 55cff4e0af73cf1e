"""Combines the changes that all adapters make to each stored tensor of the base model. An unused adapter tensor is an error.

The changes of adapters are applied one after the other. Tied parameters either stay tied or are stored separately
(docs/explanation/decisions/0010-tied-weights.md). Called by plan.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    """An output tensor that differs from its base tensor, with the source of its values and the changes of its matrices."""

    source: TensorHeader
    is_replaced: bool
    """Whether `source` is an adapter's tensor, or a part of one."""
    changes: tuple[tuple[Change, ...], ...]


@dataclass(frozen=True)
class ResolvedChanges:
    """The combined changes that all adapters make to the base model."""

    changed: Mapping[str, ChangedTensor]
    """Changed tensors by the name of the output tensor."""
    added: Mapping[str, TensorHeader]
    """Output tensors that the base does not store -> the base tensor whose values they would have without the adapters."""
    config_changes: Mapping[str, Any] = field(default_factory=dict)
    """Changed fields of config.json -> their new values."""


@dataclass
class ParameterEdit:
    """The changes that the adapters processed so far make to one parameter of the model."""

    source: TensorHeader | None = None
    """The adapter tensor that replaces the parameter before the changes are applied; None: it is not replaced."""
    changes: list[tuple[tuple[str, int] | None, Change]] = field(default_factory=list)
    """Each change with the name of the stored tensor and the index of the matrix that it changes; None: all matrices."""
    source_adapter: int | None = None
    """Index of the adapter that trained `source`; None if `source` was not trained."""
    last_adapter: int | None = None
    """Index of the last adapter that changed the parameter."""

    def is_like(self, other: ParameterEdit) -> bool:
        """Whether both make the same changes to the same values."""
        return (self.source, self.changes) == (other.source, other.changes)


def resolve_changes(model: StoredModel, base_config: Mapping[str, Any], adapters: Sequence[AdapterHeaders]) -> ResolvedChanges:
    """Combine the changes of all adapters. Raises AdapterTensorError, TiedWeightsError or UnsupportedAdapterError."""
    methods = [str(adapter.config.get("peft_type")) for adapter in adapters]
    if len(adapters) > 1 and set(methods) != {LORA}:
        raise UnsupportedAdapterError(
            f"adapters of the methods {methods} cannot be merged together, because PEFT does not define the result. Merge one, "
            "and then the next with the result as its base."
        )
    edits: dict[str, ParameterEdit] = {}
    for number, adapter in enumerate(adapters):
        changes = lora_changes if methods[number] == LORA else non_lora_changes
        _chain_adapter(edits, number, changes(adapter, model, base_config))
    require_all_rows(model, {path for path, edit in edits.items() if edit.source is not None})
    config_changes = {} if model.num_rows is None else vocabulary_settings(base_config, model.num_rows)
    changed: dict[str, ChangedTensor] = {}
    added: dict[str, TensorHeader] = {}
    for path, edit in edits.items():
        parameter = model.parameters.get(path)
        for part in parameter.parts if parameter is not None else ():
            changed[part.header.name] = _changed_part(edit, model.parameters[path], part)
    for tie in model.ties:
        edits_of_tie = [edits.get(path, ParameterEdit()) for path in tie.paths]
        if all(edit.is_like(edits_of_tie[0]) for edit in edits_of_tie):
            continue
        config = {**base_config, **config_changes}
        _require_separable(tie, edits, model, config)
        source = model.parameters[tie.source]
        for path, edit in zip(tie.paths, edits_of_tie, strict=True):
            if path not in tie.stored:
                added[path] = source.parts[0].header
                changed[path] = _changed_part(edit, source, StoredPart(added[path]))
        config_changes |= tie_settings(config, is_tied=False)
    changed = {name: tensor for name, tensor in changed.items() if tensor.is_replaced or any(tensor.changes)}
    return ResolvedChanges(changed, added, config_changes)


def _chain_adapter(edits: dict[str, ParameterEdit], number: int, adapter: AdapterChanges) -> None:
    """Add the changes of the next adapter to `edits`. Raises UnsupportedAdapterError if PEFT does not define the result."""
    for path, tensor in adapter.replacements.items():
        edit = edits.setdefault(path, ParameterEdit())
        is_copy = path in adapter.base_copies
        before = edit.source_adapter if is_copy else edit.last_adapter
        if before is not None:
            raise _ambiguous(path, before, number, f"{tensor.name} would undo it")
        edit.source = tensor  # PEFT loads all adapters before it merges any, so the last copy of the base applies
        if not is_copy:
            edit.source_adapter, edit.last_adapter = number, number
    placed_changes: list[tuple[str, tuple[str, int] | None, Change]] = []
    placed_changes += [(path, None, change) for path, changes in adapter.changes.items() for change in changes]
    placed_changes += [(matrix.path, (matrix.stored.name, matrix.matrix), matrix.change) for matrix in adapter.matrices]
    for path, place, change in placed_changes:
        edit = edits.setdefault(path, ParameterEdit())
        if edit.source_adapter not in (None, number):
            raise _ambiguous(path, edit.source_adapter, number, "the second was trained on other weights")
        if edit.last_adapter not in (None, number):
            if isinstance(change, LowRank) and change.magnitude is not None:
                raise _ambiguous(path, edit.last_adapter, number, "DoRA's norms are those of the weights that it was trained on")
            taken = {index for _, earlier in edit.changes if isinstance(earlier, TokenRows) for index in earlier.indices}
            both = taken & set(change.indices) if isinstance(change, TokenRows) else ()
            if both:
                raise UnsupportedAdapterError(
                    f"several adapters have trained row {min(both)} of {path} (trainable_token_indices), but only one of these "
                    "rows can be kept. Leave out one of the adapters."
                )
        edit.changes.append((place, change))
        edit.last_adapter = number


def _ambiguous(path: str, first: int | None, second: int, reason: str) -> UnsupportedAdapterError:
    return UnsupportedAdapterError(
        f"adapters {(first or 0) + 1} and {second + 1} both change {path}, and PEFT does not define the result: {reason}. Leave "
        "out one of them; or, if the second was trained on the merged model of the first, merge them one after the other."
    )


def _changed_part(edit: ParameterEdit, parameter: StoredParameter, part: StoredPart) -> ChangedTensor:
    """Return the changes to one of the stored tensors of a parameter."""
    base, source = part.header, edit.source
    num_matrices = base.shape[0] if any(place for place, _ in edit.changes) and len(base.shape) == 3 else 1
    matrices = tuple(
        tuple(change for place, change in edit.changes if place in (None, (base.name, matrix))) for matrix in range(num_matrices)
    )
    if source is not None and part.expert is not None:
        # The stored part holds consecutive rows of one expert.
        rows, width = parameter.shape[1], source.num_bytes // (parameter.shape[0] * parameter.shape[1])
        offset = source.offset + (part.expert * rows + part.first_row) * width
        source = replace(source, shape=base.shape, offset=offset)
    return ChangedTensor(source or base, source is not None, matrices if any(matrices) else ())


def _require_separable(tie: Tie, edits: Mapping[str, ParameterEdit], model: StoredModel, config: Mapping[str, Any]) -> None:
    """Raise TiedWeightsError unless config.json can separate the tied parameters. It can only separate a decoder's embeddings."""
    if len(tie.paths) == 2 and not model.family.always_tied and not config.get("is_encoder_decoder"):
        return
    changed = sorted(path for path in tie.paths if path in edits)
    reason = (
        "transformers ties parameters of this model type whatever config.json says"
        if model.family.always_tied
        else "config.json has no setting that separates them"
    )
    raise TiedWeightsError(
        f"the adapter changes {', '.join(changed)} differently than the others of {', '.join(tie.paths)}, which share their "
        f"memory: {reason}, so the merged model could not be stored correctly. Remove these modules from target_modules, "
        "modules_to_save and trainable_token_indices, or train all of them together with ensure_weight_tying: true."
    )

"""What all adapters together make of every stored tensor of the base model. An adapter tensor that is not used is an error.

In: where the base's parameters are stored, and the adapters in the order in which they are merged. Out: an Assignment. Called by
plan.py. lora.py and methods.py say what one adapter does to the model's parameters; here the adapters follow one another,
parameters that share memory are kept together or parted (ties.py), and parameters become stored tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from finetune_trainer.merge.adapter_changes import AdapterChanges
from finetune_trainer.merge.adapter_settings import AdapterHeaders
from finetune_trainer.merge.changes import Change, LowRank, TokenRows
from finetune_trainer.merge.lora import lora_changes
from finetune_trainer.merge.methods import other_changes
from finetune_trainer.merge.ties import Edit, part_ties
from finetune_trainer.weights.errors import UnsupportedAdapterError
from finetune_trainer.weights.headers import TensorHeader
from finetune_trainer.weights.stored import StoredModel, StoredParameter, StoredPart

LORA = "LORA"
"""`peft_type` of LoRA, rsLoRA and DoRA."""


@dataclass(frozen=True)
class Changed:
    """An output tensor that is not its base tensor: whose values it starts from, and the changes of each of its matrices."""

    source: TensorHeader
    is_replaced: bool
    """Whether `source` is an adapter's tensor, or a part of one."""
    changes: tuple[tuple[Change, ...], ...]


@dataclass(frozen=True)
class Assignment:
    """What all adapters together do to the base model."""

    changed: Mapping[str, Changed]
    """By output tensor."""
    added: Mapping[str, TensorHeader]
    """Output tensors that the base does not store, with the base tensor that they would be a copy of without the adapters."""
    config_changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of config.json."""


def assign(model: StoredModel, base_config: Mapping[str, Any], adapters: Sequence[AdapterHeaders]) -> Assignment:
    """Raises one of the AdapterTensor... errors, TiedWeightsError or UnsupportedAdapterError."""
    methods = [str(adapter.config.get("peft_type")) for adapter in adapters]
    if len(adapters) > 1 and set(methods) != {LORA}:
        raise UnsupportedAdapterError(
            f"adapters of the methods {methods} cannot be merged in one go, because PEFT does not define it. Merge one, and the "
            "next with the result as its base."
        )
    edits: dict[str, Edit] = {}
    for number, adapter in enumerate(adapters):
        _follow(edits, number, _one(adapter, model, base_config), model)
    ties = part_ties(edits, model, base_config)
    changed: dict[str, Changed] = {}
    for path, edit in edits.items():
        parameter = model.parameters.get(path)
        if parameter is not None:
            for part in parameter.parts:
                changed[part.header.name] = _of_part(edit, parameter, part)
    for path, base in ties.added.items():
        edit = edits.get(path, Edit())
        changed[path] = _of_part(edit, model.parameters[ties.sources[path]], StoredPart(base))
    return Assignment(
        {name: one for name, one in changed.items() if one.is_replaced or any(one.changes)}, ties.added, ties.config_changes
    )


def _one(adapter: AdapterHeaders, model: StoredModel, base_config: Mapping[str, Any]) -> AdapterChanges:
    if adapter.config.get("peft_type") == LORA:
        return lora_changes(adapter, model, base_config)
    return other_changes(adapter, model, base_config)


def _follow(edits: dict[str, Edit], number: int, one: AdapterChanges, model: StoredModel) -> None:
    """Let adapter `number` (from 0) follow those before it. Raises UnsupportedAdapterError where PEFT defines no result."""
    for path, tensor in one.replacements.items():
        edit = edits.setdefault(path, Edit())
        is_copy = path in one.base_copies
        before = edit.source_adapter if is_copy else edit.last_adapter
        if before is not None:
            raise _ambiguous(path, before, number, f"{tensor.name} would undo it")
        edit.source = tensor  # PEFT loads all adapters before it merges the first, so the last copy of the base holds
        if not is_copy:
            edit.source_adapter, edit.last_adapter = number, number
    found: list[tuple[str, tuple[str, int] | None, Change]] = []
    found += [(path, None, change) for path, changes in one.changes.items() for change in changes]
    for matrix in one.matrices:
        owner = model.owner(matrix.stored.name)
        if owner is not None:
            found.append((owner[0].path, (matrix.stored.name, matrix.matrix), matrix.change))
    for path, place, change in found:
        edit = edits.setdefault(path, Edit())
        if edit.source_adapter not in (None, number):
            raise _ambiguous(path, edit.source_adapter, number, "the second was trained on other weights")
        if edit.last_adapter not in (None, number):
            if isinstance(change, LowRank) and change.magnitude is not None:
                raise _ambiguous(path, edit.last_adapter, number, "DoRA's norms are those of the weights that it was trained on")
            _require_other_tokens(path, edit, change)
        edit.changes.append((place, change))
        edit.last_adapter = number


def _require_other_tokens(path: str, edit: Edit, change: Change) -> None:
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


def _of_part(edit: Edit, parameter: StoredParameter, part: StoredPart) -> Changed:
    """What becomes of one stored tensor of an edited parameter."""
    base = part.header
    num_matrices = base.shape[0] if any(place for place, _ in edit.changes) and len(base.shape) == 3 else 1
    matrices = tuple(
        tuple(change for place, change in edit.changes if place in (None, (base.name, matrix))) for matrix in range(num_matrices)
    )
    source = base if edit.source is None else _slice(edit.source, parameter, part)
    return Changed(source, edit.source is not None, matrices if any(matrices) else ())


def _slice(tensor: TensorHeader, parameter: StoredParameter, part: StoredPart) -> TensorHeader:
    """The stored part's place in a tensor that holds the whole parameter: consecutive rows of one expert."""
    if part.expert is None:
        return tensor
    rows, width = parameter.shape[1], tensor.num_bytes // (parameter.shape[0] * parameter.shape[1])
    offset = tensor.offset + (part.expert * rows + part.first_row) * width
    return TensorHeader(tensor.name, tensor.dtype, part.header.shape, tensor.file, offset)

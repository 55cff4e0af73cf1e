"""Finds which base-model parameters an adapter changes, and how, if its method is not in the LoRA family.

PEFT's own layers merge the modules of such an adapter one by one. A layer lists its tensors, so that missing, unknown and wrongly
shaped tensors are detected before a byte is written. An adapter tensor is named `base_model.model.<module>.<part>`, or
`base_model.<part>` if modules share it. resolve_changes.py calls this module for every `peft_type` except LORA.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from finetune_job.methods import INSIDE_PEFT
from finetune_job.unsupported_methods import UNSUPPORTED
from finetune_trainer.merge.adapter_changes import (
    AdapterChanges,
    apply_to_tied_copies,
    follow_ties,
    require_all_targets,
    saved_parameters,
    token_rows,
)
from finetune_trainer.merge.adapter_names import absent_in_base
from finetune_trainer.merge.adapter_settings import AdapterHeaders, adapter_settings
from finetune_trainer.merge.changes import ModuleMerge
from finetune_trainer.merge.factors import CONV1D_MODEL_TYPES, check_shapes
from finetune_trainer.weights.errors import AdapterTensorError, UnsupportedAdapterError
from finetune_trainer.weights.headers import TensorHeader
from finetune_trainer.weights.stored import StoredModel

SHARED_PREFIX = "base_model."
LAYER_NORM_PART = "ln_tuning_layers."
ROWS_PART = "trainable_tokens_delta"

CHANGED_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("LOHA", "LOKR", "VERA", "OFT", "BOFT", "HRA", "MISS"), ("weight",)),
    "IA3": ("weight", "bias"),
    "LN_TUNING": (),
    "TRAINABLE_TOKENS": (),
}
"""PEFT method -> the parameters of a module that the `merge` of its layers changes. A module may lack a bias."""

NOT_SUPPORTED: Mapping[str, str] = {kind.name: unsupported.reason for kind, unsupported in UNSUPPORTED.items()}
"""Each other PEFT method -> why it cannot be merged."""
_CHOICE = ("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern")
"""Fields, common to all methods, that choose modules."""


def non_lora_changes(adapter: AdapterHeaders, model: StoredModel, base_config: Mapping[str, Any]) -> AdapterChanges:
    """Return the changes by an adapter of a method other than LoRA.

    Every adapter tensor is used; tensors that modules share are used for each of these modules. Raises UnsupportedAdapterError
    and AdapterTensorError, which name the field or the tensor.
    """
    config, result = adapter.config, AdapterChanges()
    method = str(config.get("peft_type"))
    if method not in CHANGED_PARAMETERS:
        reason = NOT_SUPPORTED.get(method, "the method is unknown to this version")
        raise UnsupportedAdapterError(
            f"adapter_config.json: peft_type is {method}, which cannot be merged: {reason}. Publish the adapter alone "
            "(merge.enabled: false)."
        )
    chosen = adapter_settings({name: config[name] for name in _CHOICE if name in config})
    shared: dict[str, TensorHeader] = {}
    own: dict[str, dict[str, TensorHeader]] = {}
    tokens: dict[str, TensorHeader] = {}
    saved = saved_parameters(adapter, model)
    for name, tensor in adapter.tensors.items():
        if not name.startswith(INSIDE_PEFT):
            if not name.startswith(SHARED_PREFIX):
                raise AdapterTensorError(f"adapter tensor {name}: PEFT's names begin with {SHARED_PREFIX!r}.")
            shared[name] = tensor
            continue
        module, part = _split(name, model)
        whole = part.removeprefix(LAYER_NORM_PART).removeprefix("base_layer.")
        if model.own_tensor(f"{module}.{whole}") is not None:
            path, base = model.path(f"{module}.{whole}"), model.parameter(f"{module}.{whole}")
            result.replace(path, tensor)
            if base is not None:
                check_shapes({path: tensor}, {path: base.shape}, f"{base.path}, which it replaces")
            if model.num_rows is not None and not chosen.is_saved_whole(module):
                follow_ties(path, tensor, model, saved, result)
        elif method == "TRAINABLE_TOKENS" and part == ROWS_PART:
            tokens[module] = tensor
        else:
            own.setdefault(module, {})[name] = tensor
    _add_tokens(tokens, model, config, result)
    if own and not CHANGED_PARAMETERS[method]:
        name = next(iter(next(iter(own.values()))))
        raise AdapterTensorError(f"adapter tensor {name} is not a part of a {method} adapter.")
    if shared and not own:
        raise AdapterTensorError(
            f"the adapter holds {next(iter(shared))}, but no tensors of single modules. Save the adapter again from all ranks."
        )
    if own:
        require_all_targets(model, chosen, {model.path(f"{module}.weight") for module in own})
        _add_modules(own, shared, adapter, model, base_config=base_config, result=result)
    apply_to_tied_copies(adapter, model, result)
    return result


def _add_modules(
    own: Mapping[str, Mapping[str, TensorHeader]],
    shared: Mapping[str, TensorHeader],
    adapter: AdapterHeaders,
    model: StoredModel,
    *,
    base_config: Mapping[str, Any],
    result: AdapterChanges,
) -> None:
    """Add the merges of modules. own: each module's adapter tensors. shared: adapter tensors that all modules use."""
    # This imports transformers and PEFT, which take more memory than a merge of LoRA.
    from finetune_trainer.merge.steps.peft_layer import require_tensors_of_module

    config, method = adapter.config, adapter.config["peft_type"]
    merges = []
    for module, tensors in own.items():
        paths = {name: model.path(f"{module}.{name}") for name in ("weight", "bias")}
        headers = {name: result.replacements.get(paths[name]) or model.own_tensor(f"{module}.{name}") for name in paths}
        base = {name: header for name, header in headers.items() if header is not None}
        # If this guess of the layer's class is wrong, PEFT's layer has other tensors than the file, and the adapter is refused.
        layer = "Conv1D" if base_config.get("model_type") in CONV1D_MODEL_TYPES else "Linear"
        dimensions = len(base["weight"].shape)
        if dimensions > 2:
            layer = f"Conv{dimensions - 2}d"
        elif paths["weight"] in model.family.ties.values() or any("_embedding_" in name for name in tensors):
            layer = "Embedding"
        elif paths["weight"] in model.family.ties:
            layer = "Linear"
        merges.append(ModuleMerge(module, layer, "weight", base, {**tensors, **shared}, config))
    shapes = [merge.base["weight"].shape[:: -1 if merge.layer == "Conv1D" else 1] for merge in merges]
    # VeRA's layers share projections as large as the largest layer, so each layer must know that size.
    extent = (max(shape[0] for shape in shapes), max(shape[1] for shape in shapes)) if method == "VERA" else None
    inputs = config.get("feedforward_modules") or ()
    for merge in merges:
        merge = replace(merge, shared_extent=extent)
        require_tensors_of_module(merge)
        # (IA)3 does not change the bias of a module whose inputs it scales (peft tuners/ia3/model.py).
        is_input = re.fullmatch(inputs, merge.module) if isinstance(inputs, str) else merge.module.endswith(tuple(inputs))
        for name in ("weight",) if method == "IA3" and is_input else CHANGED_PARAMETERS[method]:
            if name in merge.base:
                result.add(model.path(f"{merge.module}.{name}"), replace(merge, parameter=name))


def _split(name: str, model: StoredModel) -> tuple[str, str]:
    """Split an adapter tensor's name into module and part. The module is the longest prefix that has a weight in the base."""
    parts = name.removeprefix(INSIDE_PEFT).split(".")
    for length in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:length])
        if model.own_tensor(f"{module}.weight") is not None:
            return module, ".".join(parts[length:])
    raise absent_in_base(name, name.removeprefix(INSIDE_PEFT))


def _add_tokens(
    tokens: Mapping[str, TensorHeader], model: StoredModel, config: Mapping[str, Any], result: AdapterChanges
) -> None:
    """Add trained rows. Parameters tied to an embedding get the same rows, which PEFT also writes for them.

    If only a tied head has rows, the embedding does not change, and the merged model stores the two separately.
    """
    indices = tuple(config.get("token_indices") or ())
    for module, tensor in tokens.items():
        base = model.parameter(f"{module}.weight")
        if base is None:
            raise AdapterTensorError(f"adapter tensor {tensor.name}: the base model has no {module}.weight with rows.")
        rows = token_rows(tensor, indices, base, "token_indices")
        path = model.path(f"{module}.weight")
        tie = model.tie(path)
        if tie is not None and path != tie.paths[0] and tie.paths[0] in {model.path(f"{other}.weight") for other in tokens}:
            continue
        for owner in (path,) if tie is None or path != tie.paths[0] else tie.paths:
            result.add(owner, rows)

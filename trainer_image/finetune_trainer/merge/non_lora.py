"""Changes of the base model by an adapter of a method outside LoRA's family: PEFT's layers merge its modules one by one.

In: the adapter's tensors and settings, and where the base's parameters are stored. Out: changes and whole replacements by the
model's own parameter paths, for resolve_changes.py. Called for every `peft_type` but LORA. PEFT's layer classes list their
tensors, so that a missing, unknown or wrongly shaped one is detected before a byte is written. An adapter tensor is named
`base_model.model.<module>.<part>`, or `base_model.<part>` if modules share it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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
)
from finetune_trainer.merge.adapter_names import absent_in_base
from finetune_trainer.merge.adapter_settings import AdapterHeaders, adapter_settings
from finetune_trainer.merge.changes import ModuleMerge, TokenRows
from finetune_trainer.merge.factors import CONV1D_MODEL_TYPES, check_shapes
from finetune_trainer.weights.errors import (
    AdapterTensorDuplicateError,
    AdapterTensorMisshapedError,
    AdapterTensorMissingError,
    AdapterTensorUnknownError,
    UnsupportedAdapterError,
)
from finetune_trainer.weights.headers import TensorHeader
from finetune_trainer.weights.stored import StoredModel

SHARED_PREFIX = "base_model."
LAYER_NORM_PART = "ln_tuning_layers."
ROWS_PART = "trainable_tokens_delta"

_WEIGHT = ("weight",)
_WEIGHT_AND_BIAS = ("weight", "bias")
CHANGED_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("LOHA", "LOKR", "VERA", "OFT", "BOFT", "HRA", "MISS"), _WEIGHT),
    "IA3": _WEIGHT_AND_BIAS,
    "LN_TUNING": (),
    "TRAINABLE_TOKENS": (),
}
"""PEFT's methods that merge here, and which parameters of a module each changes (its layer's `merge`).
A module may lack a bias."""

NOT_SUPPORTED: Mapping[str, str] = {kind.name: each.reason for kind, each in UNSUPPORTED.items()}
"""Why PEFT's other methods do not merge."""
_CHOICE = ("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern")
"""Fields, common to all methods, that choose modules."""


def non_lora_changes(adapter: AdapterHeaders, model: StoredModel, base_config: Mapping[str, Any]) -> AdapterChanges:
    """Changes and whole replacements by the model's own parameter paths, of an adapter of another method than LoRA.

    Every adapter tensor is used once, shared ones by every module that needs them. Raises UnsupportedAdapterError and the
    AdapterTensor... errors, naming tensor or field.
    """
    config = adapter.config
    method = _supported(config)
    result = AdapterChanges()
    shared: dict[str, TensorHeader] = {}
    own: dict[str, dict[str, TensorHeader]] = {}
    tokens: dict[str, TensorHeader] = {}
    saved = saved_parameters(adapter, model)
    for name, tensor in adapter.tensors.items():
        if not name.startswith(INSIDE_PEFT):
            if not name.startswith(SHARED_PREFIX):
                raise AdapterTensorUnknownError(f"adapter tensor {name}: PEFT's names begin with {SHARED_PREFIX!r}.")
            shared[name] = tensor
            continue
        module, part = _split(name, model)
        whole = part.removeprefix(LAYER_NORM_PART).removeprefix("base_layer.")
        if _header(model, f"{module}.{whole}") is not None:
            _replace(result, f"{module}.{whole}", tensor, model)
            if model.num_rows is not None and not adapter_settings(_chosen(config)).is_saved_whole(module):
                follow_ties(model.path(f"{module}.{whole}"), tensor, model, saved, result)
        elif method == "TRAINABLE_TOKENS" and part == ROWS_PART:
            tokens[module] = tensor
        else:
            own.setdefault(module, {})[name] = tensor
    _add_tokens(tokens, model, config, result)
    if own and not CHANGED_PARAMETERS[method]:
        name = next(iter(next(iter(own.values()))))
        raise AdapterTensorUnknownError(f"adapter tensor {name}: is not a part of a {method} adapter.")
    if shared and not own:
        raise AdapterTensorMissingError(
            f"the adapter holds {next(iter(shared))}, but no tensor of any single module. Save the adapter again from all ranks."
        )
    if own:
        require_all_targets(model, adapter_settings(_chosen(config)), {model.path(f"{module}.weight") for module in own})
    bases = {module: _parameters(module, model, result.replacements) for module in own}
    layers = {module: _layer(module, own[module], bases[module], model, base_config) for module in own}
    # VeRA's layers take their part of projections that are as large as the largest layer.
    extent = _largest(bases, layers) if method == "VERA" else None
    for module, tensors in own.items():
        merge = ModuleMerge(module, layers[module], "weight", bases[module], tensors | shared, config, extent)
        for change in _module_changes(merge, method):
            result.add(model.path(f"{module}.{change.parameter}"), change)
    apply_to_tied_copies(adapter, model, result)
    return result


def _chosen(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: config[name] for name in _CHOICE if name in config}


def _header(model: StoredModel, path: str) -> TensorHeader | None:
    """The stored tensor that holds exactly this parameter."""
    parameter = model.parameter(path)
    return (
        parameter.parts[0].header
        if parameter is not None and len(parameter.parts) == 1 and parameter.parts[0].expert is None
        else None
    )


def _supported(config: Mapping[str, Any]) -> str:
    method = str(config.get("peft_type"))
    if method not in CHANGED_PARAMETERS:
        reason = NOT_SUPPORTED.get(method, "this product does not know it")
        raise UnsupportedAdapterError(
            f"adapter_config.json: peft_type is {method}, which cannot be merged: {reason}. Publish the adapter alone "
            "(merge.enabled: false)."
        )
    return method


def _split(name: str, model: StoredModel) -> tuple[str, str]:
    """Adapter tensor name -> (module of the base model, the part within it). The module is the longest beginning that has a
    weight.
    """
    parts = name.removeprefix(INSIDE_PEFT).split(".")
    for length in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:length])
        if _header(model, f"{module}.weight") is not None:
            return module, ".".join(parts[length:])
    raise absent_in_base(name, name.removeprefix(INSIDE_PEFT))


def _replace(result: AdapterChanges, name: str, tensor: TensorHeader, model: StoredModel) -> None:
    path, base, replacements = model.path(name), model.parameter(name), result.replacements
    if path in replacements:
        raise AdapterTensorDuplicateError(
            f"adapter tensors {replacements[path].name} and {tensor.name} both replace {path}. Save the adapter again."
        )
    if base is not None:
        check_shapes({path: tensor}, {path: base.shape}, f"{base.path}, which it replaces")
    replacements[path] = tensor


def _add_tokens(
    tokens: Mapping[str, TensorHeader], model: StoredModel, config: Mapping[str, Any], result: AdapterChanges
) -> None:
    """Add trained rows. Parameters tied to an embedding get the same rows: PEFT trains them there, and writes them once more.

    If only a tied head has rows, the embedding stays as it is, and the two are separate in the merged model.
    """
    indices = tuple(config.get("token_indices") or ())
    for module, tensor in tokens.items():
        base = model.parameter(f"{module}.weight") if _header(model, f"{module}.weight") is not None else None
        if base is None:
            raise AdapterTensorUnknownError(f"adapter tensor {tensor.name}: the base model has no {module}.weight with rows.")
        rows = {module: (len(indices), *base.shape[1:])}
        check_shapes({module: tensor}, rows, f"the {len(indices)} token_indices in adapter_config.json")
        for index in indices:
            if not 0 <= index < base.shape[0]:
                raise AdapterTensorMisshapedError(
                    f"adapter_config.json: token_indices holds {index}, but {base.path} has {base.shape[0]} rows. Give the model "
                    "that the adapter was trained on as the base, or, if its vocabulary was resized, save the adapter with "
                    "save_embedding_layers=True."
                )
        path = model.path(f"{module}.weight")
        tie = model.tie(path)
        if tie is not None and path != tie.paths[0] and tie.paths[0] in {model.path(f"{other}.weight") for other in tokens}:
            continue
        for owner in (path,) if tie is None or path != tie.paths[0] else tie.paths:
            result.add(owner, TokenRows(indices, tensor))


def _parameters(module: str, model: StoredModel, replacements: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    headers = {}
    for name in _WEIGHT_AND_BIAS:
        path = f"{module}.{name}"
        header = replacements.get(model.path(path)) or _header(model, path)
        if header is not None:
            headers[name] = header
    return headers


def _layer(
    module: str, tensors: Iterable[str], base: Mapping[str, TensorHeader], model: StoredModel, base_config: Mapping[str, Any]
) -> str:
    """Class of the module. A wrong guess does not merge wrongly: PEFT's layer would then have other tensors than the file."""
    dimensions = len(base["weight"].shape)
    if dimensions > 2:
        return f"Conv{dimensions - 2}d"
    if model.path(f"{module}.weight") in model.family.ties.values() or any("_embedding_" in name for name in tensors):
        return "Embedding"
    is_head = model.path(f"{module}.weight") in model.family.ties
    return "Conv1D" if base_config.get("model_type") in CONV1D_MODEL_TYPES and not is_head else "Linear"


def _largest(bases: Mapping[str, Mapping[str, TensorHeader]], layers: Mapping[str, str]) -> tuple[int, int]:
    shapes = [
        base["weight"].shape[::-1] if layers[module] == "Conv1D" else base["weight"].shape for module, base in bases.items()
    ]
    return max(shape[0] for shape in shapes), max(shape[1] for shape in shapes)


def _module_changes(merge: ModuleMerge, method: str) -> list[ModuleMerge]:
    from finetune_trainer.merge.steps.peft_layer import require_tensors_of_module

    changed = [name for name in CHANGED_PARAMETERS[method] if name in merge.base]
    if method == "IA3" and _is_feedforward(merge.module, merge.config):
        changed = ["weight"]
    require_tensors_of_module(merge)
    return [replace(merge, parameter=name) for name in changed]


def _is_feedforward(module: str, config: Mapping[str, Any]) -> bool:
    """Whether (IA)3 scales the module's inputs, which leaves its bias as it is (peft tuners/ia3/model.py)."""
    wanted = config.get("feedforward_modules") or ()
    if isinstance(wanted, str):
        return re.fullmatch(wanted, module) is not None
    return any(module.endswith(name) for name in wanted)

"""One module merged by PEFT's own layer of the adapter's method, for methods without a formula in this package.

A model is made that has this one module only, under its own name, so that PEFT's settings find it as they would in the whole
model; the adapter is attached to it and filled as `PeftModel.from_pretrained` does it, and merged as
`merge_and_unload(safe_merge=False)` does it. That gives the bits of the whole model's merge where a layer depends on nothing
outside it but shared tensors of the adapter file. Measured for every method that finetune_job.methods says merges
(tests/unit/finetune_trainer/merge/test_non_lora.py).
Memory: the module's parameters in PEFT's dtype, the adapter's tensors for it, and PEFT's temporaries, which are fp32 products of
the weight's shape, one to three of them. One module at a time, however many threads.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn
from transformers.pytorch_utils import Conv1D

from finetune_job.module_names import ADAPTER
from finetune_trainer.merge.changes import ModuleMerge
from finetune_trainer.merge.steps.step import ReadTensor, Scratch, WholeMatrix
from finetune_trainer.model.meta_device import on_meta_device
from finetune_trainer.weights.errors import (
    AdapterTensorMisshapedError,
    AdapterTensorMissingError,
    AdapterTensorUnknownError,
    UnsupportedAdapterError,
)
from finetune_trainer.weights.rounding import all_finite, round_into

ALIGNMENT = 64
"""Bytes. The processor's vector instructions treat addresses alike that agree modulo this."""
_COMPANION = "shared_extent"
"""Module beside the merged one, of the size of the shared projections; its weight takes no memory."""
_CONVOLUTIONS = {"Conv1d": nn.Conv1d, "Conv2d": nn.Conv2d, "Conv3d": nn.Conv3d}
_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class ModuleStep(WholeMatrix):
    """Merges the module and takes one of its parameters."""

    change: ModuleMerge
    compute: torch.dtype
    read: ReadTensor

    def apply(
        self,
        values: torch.Tensor,
        rows: tuple[int, int],  # noqa: ARG002 - all of them
        out: torch.Tensor,
        scratch: Scratch,  # noqa: ARG002 - as every step
    ) -> bool:
        change = self.change
        with _one_at_a_time, torch.no_grad():
            parameters = {}
            for name, header in change.base.items():
                stored = values.view(header.shape) if name == change.parameter else self.read(header)
                parameters[name] = _placed(stored, header.offset) if stored.dtype == self.compute else stored.to(self.compute)
            merged = merged_parameter(change, parameters, {name: self.read(header) for name, header in change.adapter.items()})
            round_into(merged.view(out.shape), self.compute, out)
        return all_finite(out)


def _placed(values: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy placed in memory as in the base's mapped file: products with a vector have other bits at other alignments."""
    buffer = torch.empty(values.nbytes + ALIGNMENT, dtype=torch.uint8)
    start = (offset - buffer.data_ptr()) % ALIGNMENT
    return buffer[start : start + values.nbytes].view(values.dtype).view(values.shape).copy_(values)


def merged_parameter(
    change: ModuleMerge, parameters: Mapping[str, torch.Tensor], adapter: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """`change.parameter` as PEFT merges it, of its own shape and dtype.

    parameters: all of the module's, by name, in the dtype in which PEFT would hold them; they may be changed. adapter: the
    tensors of the file. Raises UnsupportedAdapterError, AdapterTensorMissingError, AdapterTensorUnknownError,
    AdapterTensorMisshapedError.
    """
    model = _adapted(change, parameters)
    _compare(change, _tensors(model), {name: tuple(tensor.shape) for name, tensor in adapter.items()})
    set_peft_model_state_dict(model, dict(adapter), adapter_name=ADAPTER)
    model.eval()
    layer = model.base_model.model.get_submodule(change.module)
    if hasattr(layer, "unload_and_optionally_merge_module"):
        merged: nn.Module = layer.unload_and_optionally_merge_module(True, False, None)
    else:
        layer.merge(safe_merge=False)
        merged = layer.get_base_layer()
    return merged.get_parameter(change.parameter).detach()


def require_tensors_of_module(change: ModuleMerge) -> None:
    """Check that the adapter holds for this module the tensors of PEFT's layer, in their shapes. Reads no tensor.

    Raises what `merged_parameter` raises.
    """
    shapes = {name: header.shape for name, header in change.adapter.items()}
    with on_meta_device():
        nothing = {name: torch.empty(header.shape) for name, header in change.base.items()}
        _compare(change, _tensors(_adapted(change, nothing)), shapes)


def _tensors(model: PeftModel) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that PEFT stores for the module."""
    state = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    return {name: tuple(tensor.shape) for name, tensor in state.items() if f".{_COMPANION}." not in name}


def _compare(change: ModuleMerge, wanted: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]]) -> None:
    method = change.config["peft_type"]
    for name in sorted(wanted.keys() - given.keys()):
        raise AdapterTensorMissingError(
            f"adapter tensor {name} is missing: {method} has it on {change.module}. Save the adapter again from all ranks."
        )
    for name in sorted(given.keys() - wanted.keys()):
        raise AdapterTensorUnknownError(
            f"adapter tensor {name}: {method} as adapter_config.json describes it has no such tensor on {change.module}. The "
            "file and its configuration belong to different adapters."
        )
    for name, shape in given.items():
        if shape != wanted[name]:
            raise AdapterTensorMisshapedError(
                f"adapter tensor {name}: shape {list(shape)}, expected {list(wanted[name])} for {change.module} with "
                f"{method} as adapter_config.json describes it. The adapter belongs to another base model or configuration."
            )


def _adapted(change: ModuleMerge, parameters: Mapping[str, torch.Tensor]) -> PeftModel:
    """A model of this one module with a fresh adapter."""
    root = nn.Module()
    _add(root, change.module, _base_layer(change, parameters))
    targets = {change.module}
    if change.shared_extent is not None:
        num_out, num_in = change.shared_extent
        companion = _without_values(nn.Linear, num_in, num_out, bias=False)
        companion.weight = nn.Parameter(torch.zeros(1).expand(num_out, num_in), requires_grad=False)
        root.add_module(_COMPANION, companion)
        targets.add(_COMPANION)
    try:
        config = _config(change, targets)
        return PeftModel(root, config, adapter_name=ADAPTER)
    except (ValueError, TypeError, KeyError, RuntimeError, NotImplementedError) as error:
        raise UnsupportedAdapterError(
            f"{change.module}: PEFT's {change.config['peft_type']} does not take this {change.layer}: {error}. Publish the "
            "adapter alone (merge.enabled: false)."
        ) from error


def _config(change: ModuleMerge, targets: set[str]) -> Any:
    """The adapter's settings, aimed at the module alone; the fields that choose modules were evaluated before."""
    config = PeftConfig.from_peft_type(**change.config)
    config.inference_mode = True
    aimed: dict[str, Any] = {
        "target_modules": targets,
        "target_parameters": None,
        "exclude_modules": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "modules_to_save": None,
        "bias": "none",  # trained biases are whole tensors in the file
    }
    if change.layer == "Conv1D":
        aimed["fan_in_fan_out"] = True  # PEFT would set it itself, with a warning
    for name, value in aimed.items():
        if hasattr(config, name):
            setattr(config, name, value)
    return config


def _add(root: nn.Module, path: str, module: nn.Module) -> None:
    *parents, last = path.split(".")
    for name in parents:
        child = nn.Module()
        root.add_module(name, child)
        root = child
    root.add_module(last, module)


def _without_values(layer: type[nn.Module], *arguments: Any, **named: Any) -> nn.Module:
    with torch.device("meta"):
        return layer(*arguments, **named)


def _base_layer(change: ModuleMerge, parameters: Mapping[str, torch.Tensor]) -> nn.Module:
    """A layer of the base's class and shapes with these parameters."""
    shape, has_bias = parameters["weight"].shape, "bias" in parameters
    if change.layer == "Linear":
        layer = _without_values(nn.Linear, shape[1], shape[0], bias=has_bias)
    elif change.layer == "Conv1D":
        layer = _without_values(Conv1D, shape[1], shape[0])
    elif change.layer == "Embedding":
        layer = _without_values(nn.Embedding, shape[0], shape[1])
    elif change.layer in _CONVOLUTIONS:
        # Stride and padding affect how the layer is used, not what is merged; PEFT's merge refuses groups.
        layer = _without_values(_CONVOLUTIONS[change.layer], shape[1], shape[0], tuple(shape[2:]), bias=has_bias)
    else:
        raise UnsupportedAdapterError(
            f"{change.module}: adapters on a {change.layer} cannot be merged. Publish the adapter alone."
        )
    for name, values in parameters.items():
        setattr(layer, name, nn.Parameter(values, requires_grad=False))
    return layer

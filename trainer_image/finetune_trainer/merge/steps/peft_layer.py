"""Merges one module with PEFT's own layer class for the adapter's method, if this package has no formula for the method.

A model is built that has only this module, under its own name, so that PEFT's settings match it as they do in the whole model.
The adapter is attached and loaded as in `PeftModel.from_pretrained`, and merged as in `merge_and_unload(safe_merge=False)`. The
result is bit-identical to merging the whole model, provided that a layer depends only on its module and on shared tensors of the
adapter's file. tests/unit/finetune_trainer/merge/test_non_lora.py compares the two results for every supported method.

Memory holds the module's parameters in PEFT's dtype, its adapter tensors, and one to three fp32 temporaries of the weight's
shape. Only one module is merged at a time, whatever the number of threads.
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
from finetune_trainer.weights.errors import AdapterTensorError, UnsupportedAdapterError
from finetune_trainer.weights.rounding import all_finite, round_into

ALIGNMENT = 64
"""Alignment in bytes. Vector instructions give the same bits at addresses with the same remainder modulo this number."""
_COMPANION = "shared_extent"
"""Name of an additional module in the model that has the size of the shared projections. Its weight takes no memory."""
_CONVOLUTIONS: Mapping[str, Any] = {"Conv1d": nn.Conv1d, "Conv2d": nn.Conv2d, "Conv3d": nn.Conv3d}
_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class ModuleStep(WholeMatrix):
    """Merges a module with PEFT's own layer and writes one of its parameters."""

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
                if stored.dtype == self.compute:
                    # Aligned as in the memory-mapped base file, because alignment affects the bits of matrix-vector products.
                    buffer = torch.empty(stored.nbytes + ALIGNMENT, dtype=torch.uint8)
                    start = (header.offset - buffer.data_ptr()) % ALIGNMENT
                    placed = buffer[start : start + stored.nbytes].view(stored.dtype).view(stored.shape)
                    parameters[name] = placed.copy_(stored)
                else:
                    parameters[name] = stored.to(self.compute)
            merged = _merged_parameter(change, parameters, {name: self.read(header) for name, header in change.adapter.items()})
            round_into(merged.view(out.shape), self.compute, out)
        return all_finite(out)


def _merged_parameter(
    change: ModuleMerge, parameters: Mapping[str, torch.Tensor], adapter: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Return `change.parameter` as PEFT merges it, in its own shape and dtype. Raises what `_adapted` raises.

    parameters: all parameters of the module by name, in the dtype in which PEFT would hold them; they may be changed. adapter:
    tensors of the file by name.
    """
    model = _adapted(change, parameters)
    set_peft_model_state_dict(model, adapter, adapter_name=ADAPTER)
    model.eval()
    layer = model.base_model.model.get_submodule(change.module)
    if hasattr(layer, "unload_and_optionally_merge_module"):
        merged: nn.Module = layer.unload_and_optionally_merge_module(True, False, None)
    else:
        layer.merge(safe_merge=False)
        merged = layer.get_base_layer()
    return merged.get_parameter(change.parameter).detach()


def require_tensors_of_module(change: ModuleMerge) -> None:
    """Check, without reading values, that the adapter has the tensors of PEFT's layer. Raises what `_adapted` raises."""
    with on_meta_device():
        _adapted(change, {name: torch.empty(header.shape) for name, header in change.base.items()})


def _adapted(change: ModuleMerge, parameters: Mapping[str, torch.Tensor]) -> PeftModel:
    """Return a model of this one module with a new adapter. Check that the file has the adapter's tensors in the right shapes.

    Raises UnsupportedAdapterError, AdapterTensorError.
    """
    shape, has_bias = parameters["weight"].shape, "bias" in parameters
    layer: nn.Module
    with torch.device("meta"):
        if change.layer == "Linear":
            layer = nn.Linear(shape[1], shape[0], bias=has_bias)
        elif change.layer == "Conv1D":
            layer = Conv1D(shape[1], shape[0])
        elif change.layer == "Embedding":
            layer = nn.Embedding(shape[0], shape[1])
        elif change.layer in _CONVOLUTIONS:
            # Stride and padding do not affect the merge, and PEFT refuses to merge into layers with groups, so defaults will do.
            layer = _CONVOLUTIONS[change.layer](shape[1], shape[0], tuple(shape[2:]), bias=has_bias)
        else:
            raise UnsupportedAdapterError(
                f"{change.module}: adapters on a {change.layer} cannot be merged. Publish the adapter alone."
            )
    for name, values in parameters.items():
        setattr(layer, name, nn.Parameter(values, requires_grad=False))
    root = parent = nn.Module()
    *parents, last = change.module.split(".")
    for name in parents:
        parent.add_module(name, nn.Module())
        parent = parent.get_submodule(name)
    parent.add_module(last, layer)
    if change.shared_extent is not None:
        num_out, num_in = change.shared_extent
        with torch.device("meta"):
            companion = nn.Linear(num_in, num_out, bias=False)
        companion.weight = nn.Parameter(torch.zeros(1).expand(num_out, num_in), requires_grad=False)
        root.add_module(_COMPANION, companion)
    method = change.config["peft_type"]
    try:
        config = PeftConfig.from_peft_type(**change.config)
        config.inference_mode = True
        # The fields that choose modules were evaluated before, and are replaced by the name of this module.
        overrides: dict[str, Any] = {
            "target_modules": {change.module, _COMPANION} if change.shared_extent is not None else {change.module},
            **dict.fromkeys(("target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save")),
            "bias": "none",  # trained biases are whole tensors in the file
        }
        if change.layer == "Conv1D":
            overrides["fan_in_fan_out"] = True  # PEFT would set it itself, with a warning
        for name, value in overrides.items():
            if hasattr(config, name):
                setattr(config, name, value)
        model = PeftModel(root, config, adapter_name=ADAPTER)
    except (ValueError, TypeError, KeyError, RuntimeError, NotImplementedError) as error:
        raise UnsupportedAdapterError(
            f"{change.module}: PEFT's {method} does not support this {change.layer}: {error}. Publish the adapter alone "
            "(merge.enabled: false)."
        ) from error
    state = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    expected = {name: tuple(tensor.shape) for name, tensor in state.items() if f".{_COMPANION}." not in name}
    for name in sorted(expected.keys() - change.adapter.keys()):
        raise AdapterTensorError(
            f"adapter tensor {name} is missing: {method} has it on {change.module}. Save the adapter again from all ranks."
        )
    for name, header in sorted(change.adapter.items()):
        if name not in expected:
            raise AdapterTensorError(
                f"adapter tensor {name}: {method} as adapter_config.json describes it has no such tensor on {change.module}. The "
                "file and its configuration belong to different adapters."
            )
        if header.shape != expected[name]:
            raise AdapterTensorError(
                f"adapter tensor {name}: shape {list(header.shape)}, expected {list(expected[name])} for {change.module} with "
                f"{method} as adapter_config.json describes it. The adapter belongs to another base model or configuration."
            )
    return model

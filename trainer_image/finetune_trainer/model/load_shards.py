"""Loads a base model so that each rank reads only its shards: host memory holds a shard and a block, not the whole model.

Life of a parameter: zeros that have never been written (such pages take no memory)
    -> sharded like any other, which copies the shard and frees the rest
    -> the shard is filled from the safetensors files, block by block.
This works for models whose files hold the weights under the model's own names; others are loaded whole (model/load.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.pytorch_utils import Conv1D

from finetune_job.methods import INSIDE_PEFT
from finetune_job.module_names import ADAPTER
from finetune_job.plan.run_plan import RunPlan
from finetune_job.sharding import can_load_shards
from finetune_trainer.checkpoint.state import ParameterRange
from finetune_trainer.errors import InvariantError, ModelError
from finetune_trainer.model.dtypes import resolve_dtypes
from finetune_trainer.model.invariants import LORA_MARKS
from finetune_trainer.model.load import (
    SAFETENSORS_DTYPES,
    build_with_lazy_zeros,
    lazy_zeros,
    pack_layers,
    packed_dtype,
    stored_dtype,
)
from finetune_trainer.model.packed_weights import is_to_be_packed, make_fit_for_training
from finetune_trainer.weights.errors import MergeError
from finetune_trainer.weights.headers import DTYPE_BYTES, TensorHeader, read_checkpoint

log = logging.getLogger(__name__)
BLOCK_BYTES = 16 * 2**20
"""Number of bytes that are read at a time."""


def stored_by_name(model: PreTrainedModel, directory: Path) -> Mapping[str, TensorHeader] | None:
    """Return headers by parameter name; None if the files hold different tensors, which a loader must convert."""
    if get_model_conversion_mapping(model, add_legacy=False):
        return None
    try:
        headers = read_checkpoint(directory).tensors
    except MergeError:
        return None
    # named_parameters() names a tied weight once, and state_dict() leaves out computed buffers, so both are combined.
    buffers = dict(model.named_buffers())
    wanted = dict(model.named_parameters()) | {name: buffers[name] for name in model.state_dict() if name in buffers}
    for name, tensor in wanted.items():
        header = headers.get(name)
        if header is None or header.shape != tuple(tensor.shape) or header.dtype not in SAFETENSORS_DTYPES:
            return None
    return headers


@dataclass(frozen=True)
class UnloadedModel:
    """A base model whose parameters are zeros that have never been written, and the places where their values are stored."""

    module: PreTrainedModel
    """The model in training mode. Buffers that are computed have their values."""
    headers: Mapping[str, TensorHeader]
    """Headers by parameter name, including all names of tied parameters, and by the names of stored buffers."""


def unloaded_base_model(plan: RunPlan, directory: Path, device: torch.device) -> UnloadedModel | None:
    """Return a model of which a rank can load only its shards, with 4-bit layers if the plan packs weights; None: load it whole.

    `device`: the device for training. Raises ModelError.
    """
    quantization = plan.method.quantization
    bits = None if quantization is None else quantization.bits
    if not can_load_shards(plan.method.type, bits, has_remote_code=plan.model.allow_remote_code):
        return None
    model = build_with_lazy_zeros(plan, directory)
    dtypes = resolve_dtypes(plan, stored_dtype(directory))
    dtype = dtypes.load
    headers = stored_by_name(model, directory)
    if keeps_some_in_float32(model, dtype) or _has_magnitudes_of_embeddings(model, plan) or headers is None:
        log.info("every rank loads the whole model: its files do not hold the parameters as %s does", type(model).__name__)
        return None
    headers = {**headers, **tied_headers(model, headers)}
    if quantization is not None:
        pack_layers(model, quantization, packed_dtype(plan, dtypes), lazy_zeros)
        make_fit_for_training(model, device)
    model.config.use_cache = False
    model.train()
    return UnloadedModel(model, headers)


def tied_headers(model: PreTrainedModel, headers: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Return the header of each parameter by all of its names, including names of tied parameters that the files lack.

    An adapter can separate tied parameters: a trained copy of the output head starts at the values of the input embedding.
    """
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: headers[first_names[id(parameter)]] for name, parameter in every}


def keeps_some_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> bool:
    """Whether transformers would hold only some of the modules in float32."""
    always = bool(model._keep_in_fp32_modules_strict)  # noqa: SLF001 - transformers has no public name for it
    return dtype is not torch.float32 and (always or (dtype is torch.float16 and bool(model._keep_in_fp32_modules)))  # noqa: SLF001


def _has_magnitudes_of_embeddings(model: nn.Module, plan: RunPlan) -> bool:
    """Whether DoRA adapts an embedding, for which it uses the norms of columns."""
    lora = plan.method.lora
    if lora is None or not lora.use_dora:
        return False
    embeddings = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    return any(name.endswith(target) for name in embeddings for target in lora.target_modules)


def measure_magnitudes(model: nn.Module, headers: Mapping[str, TensorHeader]) -> None:
    """Set each DoRA magnitude to the norms of its weight, with one whole weight in memory at a time. Call this before sharding.

    Magnitudes of 4-bit weights are measured when the weights are packed (model/pack_shards.py). Raises InvariantError for a layer
    that is not linear.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer) or ADAPTER not in layer.lora_magnitude_vector:
            continue
        base, magnitude = layer.get_base_layer(), layer.lora_magnitude_vector[ADAPTER]
        if is_to_be_packed(base):
            continue
        if not isinstance(base, nn.Linear | Conv1D) or not isinstance(magnitude, DoraLinearLayer):
            raise InvariantError(f"{name}: magnitudes of a {type(base).__name__} cannot be measured weight by weight")
        dtype, own_dtype = base.weight.dtype, magnitude.weight.dtype
        whole = torch.empty(base.weight.shape, dtype=dtype)
        read_into(headers[base_name(f"{name}.base_layer.weight")], 0, whole.view(-1), dtype)
        a, b = (factor[ADAPTER].weight.detach().to(dtype) for factor in (layer.lora_A, layer.lora_B))
        norms = initial_magnitudes(whole, a, b, layer.scaling[ADAPTER], is_transposed=magnitude.fan_in_fan_out)
        magnitude.weight = nn.Parameter(norms.to(own_dtype), requires_grad=True)


def initial_magnitudes(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, *, is_transposed: bool = False
) -> torch.Tensor:
    """Return the norms of the rows of `weight` + `scaling` * `b` @ `a`, computed by PEFT. weight: [rows, columns], or transposed
    if `is_transposed`; a, b: in the element type in which PEFT attaches them.
    """
    measured, magnitude = nn.Linear(1, 1, bias=False), DoraLinearLayer(is_transposed)
    measured.weight = nn.Parameter(weight, requires_grad=False)
    with torch.no_grad():
        magnitude.update_layer(base_layer=measured, lora_A=a, lora_B=b, scaling=scaling)
    norms: torch.Tensor = magnitude.weight.detach()
    return norms


def read_token_rows(model: nn.Module, headers: Mapping[str, TensorHeader]) -> None:
    """Set each trained row of an embedding to the values of the row that it replaces. Call this before sharding.

    Values pass through the embedding's element type, as they do when PEFT reads them from a base that is loaded whole.
    """
    for name, layer in model.named_modules():
        # A tied output head shares the trained rows of the input embedding, so the rows are filled only there.
        if not isinstance(layer, TrainableTokensLayer) or layer.tied_adapter is not None:
            continue
        weight, rows = layer.get_base_layer().weight, layer.trainable_tokens_delta[ADAPTER]
        header, width = headers[base_name(f"{name}.weight")], weight.shape[1]
        with torch.no_grad():
            for place, index in enumerate(layer.token_indices[ADAPTER]):
                read_into(header, index * width, rows[place], weight.dtype)
            layer.trainable_tokens_original[ADAPTER].copy_(rows)


def fill_from_files(
    model: nn.Module, pieces: list[ParameterRange], headers: Mapping[str, TensorHeader], loaded: torch.dtype
) -> None:
    """Fill this rank's `pieces` of the base's parameters, and its stored buffers. Call this after sharding.

    `loaded`: element type in which the base is loaded; all values pass through it. Raises ModelError if a file ends early,
    InvariantError for a parameter that is neither stored nor part of an adapter.
    """
    with torch.no_grad():
        for piece in pieces:
            header = headers.get(base_name(piece.name))
            if header is None and not any(mark in piece.name.split(".") for mark in LORA_MARKS):
                raise InvariantError(f"no tensor in the model's files fills {piece.name}")
            if header is not None and piece.stop > piece.start:
                read_into(header, piece.start, piece.parameter_values(), loaded)
        for name, buffer in model.named_buffers():
            header = headers.get(base_name(name))
            if header is not None:
                whole = torch.empty(buffer.shape, dtype=buffer.dtype)
                read_into(header, 0, whole.view(-1), buffer.dtype)
                buffer.copy_(whole)


def base_name(name: str) -> str:
    """Return the base model's name for a parameter of a PEFT model; for an adapter's parameter, a name that the base lacks."""
    parts = name.removeprefix(INSIDE_PEFT).split(".")
    wrapped = ("base_layer", "original_module", "modules_to_save", "token_adapter", ADAPTER)
    return ".".join(part for part in parts if part not in wrapped)


def read_into(header: TensorHeader, start: int, target: torch.Tensor, loaded: torch.dtype) -> None:
    """Read elements [start, start + len(target)) of a stored tensor into 1-dimensional `target`, converting to `loaded` first."""
    stored = SAFETENSORS_DTYPES[header.dtype]
    width = DTYPE_BYTES[header.dtype]
    with header.file.open("rb", buffering=0) as file:
        for first, last in _blocks(target.numel(), BLOCK_BYTES // width):
            block = torch.empty(last - first, dtype=stored)
            view = block.view(torch.uint8).numpy().data
            file.seek(header.offset + (start + first) * width)
            if _read_all(file, view) != len(view):
                raise ModelError(f"{header.file} ends inside {header.name}", "copy it to the claim again")
            target[first:last].copy_(block.to(loaded))


def _read_all(file: FileIO, view: memoryview) -> int:
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            break
        done += count
    return done


def _blocks(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield consecutive ranges of at most `size` that together are [0, count)."""
    return ((first, min(first + size, count)) for first in range(0, count, size))

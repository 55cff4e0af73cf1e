"""Builds models with transformers and PEFT but without base weights, and merges adapters into base weights.

Base weights are NaNs that take no memory, so the logits show if a weight is used before it is loaded. Tensors on the meta device
would not show it: a linear layer on the CPU would compute with whatever is in memory. If there are several adapters,
MergedWeights merges all but the last one in a skeleton of its own, module by module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn
from transformers import PreTrainedModel

from finetune_trainer.model.load import reserve_parameters
from finetune_trainer.verify.model_class import Build, config_of
from finetune_trainer.verify.stored_weights import StoredWeights
from finetune_trainer.weights.headers import read_adapter, read_checkpoint
from finetune_trainer.weights.rounding import READ_DTYPES

HOST = torch.device("cpu")


@dataclass(frozen=True)
class ParameterSlot:
    """A parameter of a module, to be filled with the values of the base's parameter `path` before the module runs."""

    module: nn.Module
    name: str
    path: str
    dtype: torch.dtype
    device: torch.device
    """Device on which the module computes."""


@dataclass(frozen=True)
class SkeletonModel:
    """A model without base weights, and the slots for the base weights."""

    model: nn.Module
    base: PreTrainedModel
    """The base model inside `model`, or `model` itself if there is no adapter."""
    slots: tuple[ParameterSlot, ...]


@dataclass(frozen=True)
class ElementTypes:
    """Element types that the library chooses for a model and for its parameters."""

    of_model: torch.dtype
    of_parameters: Mapping[str, torch.dtype]


def element_types(directory: Path, build: Build, *, allow_remote_code: bool = False) -> ElementTypes:
    """Return the element types with which the library loads the model in a directory. Raises what the library raises.

    The library gets empty tensors that match the files' headers. From the files themselves, it would needlessly read all values.
    """
    built = build(config_of(directory, allow_remote_code=allow_remote_code))
    # The order matters: if config.json names no type, the library takes that of the first suitable tensor.
    tensors = sorted(read_checkpoint(directory).tensors.values(), key=lambda header: (header.file, header.name))
    headers = [header for header in tensors if header.dtype in READ_DTYPES]
    example = type(built).from_pretrained(
        None,
        config=built.config,
        state_dict={header.name: torch.empty(header.shape, dtype=READ_DTYPES[header.dtype], device="meta") for header in headers},
        dtype="auto",
        device_map={"": "meta"},
    )
    return ElementTypes(
        example.dtype, {name: parameter.dtype for name, parameter in example.named_parameters(remove_duplicate=False)}
    )


def skeleton_model(
    weights: StoredWeights,
    adapter: Path | None,
    build: Build,
    types: ElementTypes | None = None,
    *,
    device: torch.device = HOST,
    allow_remote_code: bool = False,
) -> SkeletonModel:
    """Build the model of `weights.directory` without base weights, with `adapter` attached.

    build: from `model_builder`. types: the model's element types; None: determined here. device: where the model runs. Raises
    what the libraries raise.
    """
    directory = weights.directory
    types = types or element_types(directory, build, allow_remote_code=allow_remote_code)
    config = config_of(directory, allow_remote_code=allow_remote_code)
    if weights.num_rows is not None:
        config.get_text_config().vocab_size = weights.num_rows
    base = build(config, dtype=types.of_model)
    for name, parameter in base.named_parameters(remove_duplicate=False):
        if parameter.dtype is not types.of_parameters[name]:
            owner, _, last = name.rpartition(".")
            empty = nn.Parameter(torch.empty_like(parameter, dtype=types.of_parameters[name]), requires_grad=False)
            base.get_submodule(owner)._parameters[last] = empty  # noqa: SLF001
    reserve_parameters(base)
    stored = base.state_dict().keys()
    for name, buffer in base.named_buffers():
        if name in stored and weights.holds(name):  # all other buffers were computed when the model was built
            buffer.copy_(weights.whole(name, buffer.dtype))
    owners = [
        (module, name, f"{path}.{name}".removeprefix("."))
        for path, module in base.named_modules(remove_duplicate=False)
        for name in module._parameters  # noqa: SLF001
        if module._parameters[name] is not None  # noqa: SLF001
    ]
    original = {id(module._parameters[name]) for module, name, _ in owners}  # noqa: SLF001
    model: nn.Module = base if adapter is None else PeftModel.from_pretrained(base, str(adapter))
    named = dict(model.named_parameters(remove_duplicate=False))
    # Parameters of the base whose values are in the adapter's file, such as biases and embeddings.
    from_adapter = {id(named[name]) for name in read_adapter(adapter).tensors if name in named} if adapter is not None else set()
    slots: dict[tuple[int, str], ParameterSlot] = {}
    for module, name, path in owners:
        parameter = module._parameters.get(name)  # noqa: SLF001
        # An adapter's copy has replaced the base's parameter, or already contains its values.
        if parameter is None or id(parameter) not in original or id(parameter) in from_adapter:
            continue
        slots.setdefault((id(module), name), ParameterSlot(module, name, path, parameter.dtype, device))
    for slot in slots.values():
        offload(slot)
    # Other parameters and buffers are moved one by one, because `Module.to` would allocate values for empty tensors.
    for module in model.modules() if device != HOST else ():
        for name, parameter in module._parameters.items():  # noqa: SLF001
            if parameter is not None and (id(module), name) not in slots:
                module._parameters[name] = nn.Parameter(parameter.to(device), requires_grad=False)  # noqa: SLF001
        for name, buffer in module._buffers.items():  # noqa: SLF001
            if buffer is not None:
                module._buffers[name] = buffer.to(device)  # noqa: SLF001
    model.eval()
    return SkeletonModel(model, base, tuple(slots.values()))


def offload(slot: ParameterSlot) -> None:
    """Replace the values of a slot with NaNs that take no memory."""
    parameter = slot.module.get_parameter(slot.name)
    nothing = torch.full((1,) * parameter.dim(), torch.nan, dtype=slot.dtype, device=slot.device).expand(parameter.shape)
    slot.module._parameters[slot.name] = nn.Parameter(nothing, requires_grad=False)  # noqa: SLF001


class WeightSource(Protocol):
    """Source of a skeleton's weights."""

    def whole(self, path: str, dtype: torch.dtype) -> torch.Tensor:
        """Return all values of a parameter, in the model's shape and rounded to `dtype`. Raises MergeError."""


class MergedWeights:
    """`weights` with `adapter` merged into them. Raises what the libraries raise."""

    def __init__(
        self, stored: StoredWeights, weights: WeightSource, adapter: Path, build: Build, *, allow_remote_code: bool = False
    ) -> None:
        self._weights = weights
        self._skeleton = skeleton_model(stored, adapter, build, allow_remote_code=allow_remote_code)
        self._empty: dict[str, list[ParameterSlot]] = {}
        for slot in self._skeleton.slots:
            self._empty.setdefault(slot.path, []).append(slot)

    def whole(self, path: str, dtype: torch.dtype) -> torch.Tensor:
        owner, _, name = path.rpartition(".")
        module = self._skeleton.base.get_submodule(owner)
        if isinstance(module, TrainableTokensWrapper):
            module = module.token_adapter
        if isinstance(module, ModulesToSaveWrapper):
            copy: nn.Module = module.modules_to_save[module.active_adapter]
            return copy.get_parameter(name).detach().to(dtype)
        if not isinstance(module, BaseTunerLayer):
            return self._weights.whole(path, dtype) if path in self._empty else module.get_parameter(name).detach().to(dtype)
        within = {id(part) for part in module.modules()}
        slots = [slot for slots_of_path in self._empty.values() for slot in slots_of_path if id(slot.module) in within]
        for slot in slots:
            values = self._weights.whole(slot.path, slot.dtype)
            slot.module._parameters[slot.name] = nn.Parameter(values, requires_grad=False)  # noqa: SLF001
        innermost: nn.Module = module
        # Adapters of several parameters of one module are nested, and each layer merges its own adapter.
        while isinstance(innermost, BaseTunerLayer):
            with torch.no_grad():
                innermost.merge(safe_merge=False)
            innermost = innermost.base_layer
        merged = innermost.get_parameter(name).detach()
        for layer in module.modules():
            if isinstance(layer, BaseTunerLayer):
                layer.merged_adapters.clear()
        for slot in slots:
            offload(slot)
        return merged.to(dtype)

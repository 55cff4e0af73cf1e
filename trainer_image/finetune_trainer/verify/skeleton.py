"""A model's structure as transformers and PEFT build it, without its base weights, and base weights with adapters merged in.

Base weights are NaNs that take no memory: one that is used without having been loaded shows in the logits. Tensors on the meta
device would not work: a linear layer on the CPU computes with such a weight, from whatever is in memory. If several adapters are
merged, MergedWeights merges the earlier ones in a skeleton of its own, module by module.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from finetune_trainer.model.load import reserve_parameters, without_values
from finetune_trainer.verify.stored_weights import StoredWeights
from finetune_trainer.weights.headers import read_adapter, read_checkpoint
from finetune_trainer.weights.rounding import READ_DTYPES

HOST = torch.device("cpu")


@dataclass(frozen=True)
class ParameterSlot:
    """One parameter of one module that must be filled with the base's `path` before the module runs."""

    module: nn.Module
    name: str
    path: str
    dtype: torch.dtype
    device: torch.device
    """Device on which the module computes."""


@dataclass(frozen=True)
class SkeletonModel:
    """A model without base weights, and the slots for these."""

    model: nn.Module
    base: PreTrainedModel
    """The base model inside `model`, or `model` itself."""
    slots: tuple[ParameterSlot, ...]
    looked_up: frozenset[str]
    """Paths of the input embeddings, of which a forward pass needs single rows."""

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.base.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """Device on which the model computes."""
        device: torch.device = self.base.device
        return device


def model_class(directory: Path, *, allow_remote_code: bool = False) -> Any:
    """The class with which PEFT and users load this model."""
    config = AutoConfig.from_pretrained(directory, trust_remote_code=allow_remote_code, local_files_only=True)
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


@dataclass(frozen=True)
class ElementTypes:
    """Element types that the library chooses for a model and for its parameters."""

    of_model: torch.dtype
    of_parameters: Mapping[str, torch.dtype]


def element_types(directory: Path, *, allow_remote_code: bool = False) -> ElementTypes:
    """Element types of the model in a directory, as the library loads it. Raises what the library raises.

    The library gets tensors made from the files' headers: from the files it would read all values, although it discards them.
    """
    loader = model_class(directory, allow_remote_code=allow_remote_code)
    config = AutoConfig.from_pretrained(directory, trust_remote_code=allow_remote_code, local_files_only=True)
    with without_values(allow_remote_code=allow_remote_code):
        built = loader.from_config(config, trust_remote_code=allow_remote_code)
    # In the order in which the library looks for the first tensor whose type becomes the model's, if config.json names none.
    tensors = sorted(read_checkpoint(directory).tensors.values(), key=lambda header: (header.file, header.name))
    headers = [header for header in tensors if header.dtype in READ_DTYPES]
    example = type(built).from_pretrained(
        None,
        config=built.config,
        state_dict={each.name: torch.empty(each.shape, dtype=READ_DTYPES[each.dtype], device="meta") for each in headers},
        dtype="auto",
        device_map={"": "meta"},
    )
    return ElementTypes(
        example.dtype, {name: parameter.dtype for name, parameter in example.named_parameters(remove_duplicate=False)}
    )


def skeleton_model(
    weights: StoredWeights,
    adapter: Path | None,
    types: ElementTypes | None = None,
    *,
    device: torch.device = HOST,
    allow_remote_code: bool = False,
) -> SkeletonModel:
    """The model of `weights.directory`, with `adapter` attached.

    types: its element types; None: determined here. device: on which it runs. Raises what the libraries raise.
    """
    directory = weights.directory
    types = types or element_types(directory, allow_remote_code=allow_remote_code)
    loader = model_class(directory, allow_remote_code=allow_remote_code)
    config = AutoConfig.from_pretrained(directory, trust_remote_code=allow_remote_code, local_files_only=True)
    if weights.num_rows is not None:
        config.get_text_config().vocab_size = weights.num_rows
    with without_values(allow_remote_code=allow_remote_code):
        base: PreTrainedModel = loader.from_config(config, dtype=types.of_model, trust_remote_code=allow_remote_code)
    for name, parameter in base.named_parameters(remove_duplicate=False):
        if parameter.dtype is not types.of_parameters[name]:
            owner, _, last = name.rpartition(".")
            held = nn.Parameter(torch.empty_like(parameter, dtype=types.of_parameters[name]), requires_grad=False)
            base.get_submodule(owner)._parameters[last] = held  # noqa: SLF001
    reserve_parameters(base)
    _fill_buffers(base, weights)
    owners = [
        (module, name, f"{path}.{name}".removeprefix("."))
        for path, module in base.named_modules(remove_duplicate=False)
        for name in module._parameters  # noqa: SLF001
        if module._parameters[name] is not None  # noqa: SLF001
    ]
    embeddings = base.get_input_embeddings()
    looked_up = frozenset(
        path
        for module, name, path in owners
        if module._parameters[name] is embeddings._parameters.get("weight")  # noqa: SLF001
    )
    original = {id(module._parameters[name]) for module, name, _ in owners}  # noqa: SLF001
    model: nn.Module = base if adapter is None else PeftModel.from_pretrained(base, str(adapter))
    given = _given_by(adapter, model) if adapter is not None else frozenset()
    slots: dict[tuple[int, str], ParameterSlot] = {}
    for module, name, path in owners:
        parameter = module._parameters.get(name)  # noqa: SLF001
        # An adapter's copy has replaced the base's parameter, or already contains its values.
        if parameter is None or id(parameter) not in original or id(parameter) in given:
            continue
        slots.setdefault((id(module), name), ParameterSlot(module, name, path, parameter.dtype, device))
    for slot in slots.values():
        offload(slot)
    _move_others(model, slots, device)
    model.eval()
    return SkeletonModel(model, base, tuple(slots.values()), looked_up)


def offload(slot: ParameterSlot) -> None:
    """Drop the values of a slot."""
    held = slot.module.get_parameter(slot.name)
    nothing = torch.full((1,) * held.dim(), torch.nan, dtype=slot.dtype, device=slot.device).expand(held.shape)
    slot.module._parameters[slot.name] = nn.Parameter(nothing, requires_grad=False)  # noqa: SLF001


def _move_others(model: nn.Module, slots: Collection[tuple[int, str]], device: torch.device) -> None:
    """Move buffers, and parameters that are no slots. `Module.to` would allocate values for empty tensors."""
    if device == HOST:
        return
    for module in model.modules():
        for name, parameter in module._parameters.items():  # noqa: SLF001
            if parameter is not None and (id(module), name) not in slots:
                module._parameters[name] = nn.Parameter(parameter.to(device), requires_grad=False)  # noqa: SLF001
        for name, buffer in module._buffers.items():  # noqa: SLF001
            if buffer is not None:
                module._buffers[name] = buffer.to(device)  # noqa: SLF001


def _fill_buffers(model: nn.Module, weights: StoredWeights) -> None:
    """Fill stored buffers; the others were computed when the model was built."""
    stored = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in stored and weights.holds(name):
            buffer.copy_(weights.whole(name, buffer.dtype))


def _given_by(adapter: Path, model: nn.Module) -> frozenset[int]:
    """Parameters of the base for which the adapter's file has values: biases, embeddings."""
    named: Mapping[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
    return frozenset(id(named[name]) for name in read_adapter(adapter).tensors if name in named)


class WeightSource(Protocol):
    """Source of a skeleton's weights; see StoredWeights for the methods."""

    def whole(self, path: str, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor: ...
    def rows(self, path: str, first: int, last: int, dtype: torch.dtype) -> torch.Tensor: ...
    def some_rows(self, path: str, indices: Iterable[int], dtype: torch.dtype) -> torch.Tensor: ...
    def is_one_tensor(self, path: str) -> bool: ...


class MergedWeights:
    """`weights` with `adapter` merged into them. Raises what the libraries raise."""

    def __init__(self, stored: StoredWeights, weights: WeightSource, adapter: Path, *, allow_remote_code: bool = False) -> None:
        self._weights = weights
        self._skeleton = skeleton_model(stored, adapter, allow_remote_code=allow_remote_code)
        self._empty: dict[str, list[ParameterSlot]] = {}
        for slot in self._skeleton.slots:
            self._empty.setdefault(slot.path, []).append(slot)

    def whole(self, path: str, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
        module, name = self._owner(path)
        if isinstance(module, TrainableTokensWrapper):
            module = module.token_adapter
        if isinstance(module, ModulesToSaveWrapper):
            copy: nn.Module = module.modules_to_save[module.active_adapter]
            return copy.get_parameter(name).detach().to(dtype)
        if not isinstance(module, BaseTunerLayer):
            return self._weights.whole(path, dtype, out) if path in self._empty else module.get_parameter(name).detach().to(dtype)
        within = {id(part) for part in module.modules()}
        slots = [slot for slots_of_path in self._empty.values() for slot in slots_of_path if id(slot.module) in within]
        for slot in slots:
            values = self._weights.whole(slot.path, slot.dtype)
            slot.module._parameters[slot.name] = nn.Parameter(values, requires_grad=False)  # noqa: SLF001
        with torch.no_grad():
            module.merge(safe_merge=False)
        merged = _innermost(module).get_parameter(name).detach()
        for layer in module.modules():
            if isinstance(layer, BaseTunerLayer):
                layer.merged_adapters.clear()
        for slot in slots:
            offload(slot)
        return merged.to(dtype)

    def rows(self, path: str, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
        if self._is_plain(path):
            return self._weights.rows(path, first, last, dtype)
        return self.whole(path, dtype)[first:last].clone()

    def some_rows(self, path: str, indices: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        return self._weights.some_rows(path, indices, dtype)

    def is_one_tensor(self, path: str) -> bool:
        return self._is_plain(path) and self._weights.is_one_tensor(path)

    def _owner(self, path: str) -> tuple[nn.Module, str]:
        owner, _, name = path.rpartition(".")
        return self._skeleton.base.get_submodule(owner), name

    def _is_plain(self, path: str) -> bool:
        module, _ = self._owner(path)
        adapted = isinstance(module, BaseTunerLayer | ModulesToSaveWrapper | TrainableTokensWrapper)
        return not adapted and path in self._empty


def _innermost(layer: nn.Module) -> nn.Module:
    while isinstance(layer, BaseTunerLayer):
        layer = layer.base_layer
    return layer

"""A model's structure as transformers and PEFT build it, its base weights NaNs that take no room, the adapter's own tensors real.

Called by streaming.py. A base weight that is used without having been loaded makes NaNs of the logits, which are looked for there.
Tensors on the meta device would not do: a linear layer on the CPU computes with such a weight, from whatever lies in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from peft import PeftModel
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from finetune_job.methods import METHODS
from finetune_trainer.model.load import reserve_parameters
from finetune_trainer.verify.weights import StoredWeights
from finetune_trainer.weights.headers import ADAPTER_CONFIG_FILE, read_adapter, read_json

ADAPTER_FROM_BASE_WEIGHTS = frozenset(str(method.peft_type) for method in METHODS.values() if method.needs.decomposes_base)
"""Methods whose layers compute part of themselves from the base's weights as they are attached."""


@dataclass(frozen=True)
class Place:
    """One parameter of one module that has to be filled with the base's `path` before the module runs."""

    module: nn.Module
    name: str
    path: str
    dtype: torch.dtype


@dataclass(frozen=True)
class HollowModel:
    """What runs, and where its base weights are missing."""

    model: nn.Module
    base: PreTrainedModel
    """Inside `model`, or `model` itself."""
    places: tuple[Place, ...]
    looked_up: frozenset[str]
    """Paths of the input embeddings, of which a forward pass needs single rows."""

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.base.dtype
        return dtype


def model_class(directory: Path, *, allow_remote_code: bool = False) -> Any:
    """The class that PEFT and users load this model with."""
    config = AutoConfig.from_pretrained(directory, trust_remote_code=allow_remote_code, local_files_only=True)
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def hollow_model(weights: StoredWeights, adapter: Path | None, *, allow_remote_code: bool = False) -> HollowModel:
    """The model of `weights.directory`, with `adapter` attached. Raises what the libraries raise."""
    directory = weights.directory
    loader = model_class(directory, allow_remote_code=allow_remote_code)
    # The library's own decisions about element types, some of which it takes parameter by parameter.
    example = loader.from_pretrained(
        directory,
        dtype="auto",
        device_map={"": "meta"},
        trust_remote_code=allow_remote_code,
        local_files_only=True,
        use_safetensors=True,
    )
    dtypes = {name: parameter.dtype for name, parameter in example.named_parameters(remove_duplicate=False)}
    config = AutoConfig.from_pretrained(directory, trust_remote_code=allow_remote_code, local_files_only=True)
    with init_empty_weights(include_buffers=False):
        base: PreTrainedModel = loader.from_config(config, dtype=example.dtype, trust_remote_code=allow_remote_code)
    del example
    for name, parameter in base.named_parameters(remove_duplicate=False):
        if parameter.dtype is not dtypes[name]:
            owner, _, last = name.rpartition(".")
            held = nn.Parameter(torch.empty_like(parameter, dtype=dtypes[name]), requires_grad=False)
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
    looked_up = frozenset(path for module, name, path in owners if module._parameters[name] is embeddings._parameters.get("weight"))  # noqa: SLF001
    original = {id(module._parameters[name]) for module, name, _ in owners}  # noqa: SLF001
    model: nn.Module = base if adapter is None else PeftModel.from_pretrained(base, str(adapter))
    given = _given_by(adapter, model) if adapter is not None else frozenset()
    places: dict[tuple[int, str], Place] = {}
    for module, name, path in owners:
        parameter = module._parameters.get(name)  # noqa: SLF001
        # An adapter's copy stands where the base's parameter was, or its values are in it already.
        if parameter is None or id(parameter) not in original or id(parameter) in given:
            continue
        places.setdefault((id(module), name), Place(module, name, path, parameter.dtype))
    for place in places.values():
        empty_again(place)
    model.eval()
    return HollowModel(model, base, tuple(places.values()), looked_up)


def empty_again(place: Place) -> None:
    """Let go of the values."""
    held = place.module.get_parameter(place.name)
    nothing = torch.full((1,) * held.dim(), torch.nan, dtype=place.dtype).expand(held.shape)
    place.module._parameters[place.name] = nn.Parameter(nothing, requires_grad=False)  # noqa: SLF001


def _fill_buffers(model: nn.Module, weights: StoredWeights) -> None:
    """Buffers that are stored; the others were computed when the model was built."""
    stored = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in stored and weights.holds(name):
            buffer.copy_(weights.whole(name, buffer.dtype))


def _given_by(adapter: Path, model: nn.Module) -> frozenset[int]:
    """Parameters of the base that the adapter's file has values for: biases, embeddings."""
    named: Mapping[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
    return frozenset(id(named[name]) for name in read_adapter(adapter).tensors if name in named)


def needs_base_weights(adapter: Path) -> bool:
    """Whether the adapter cannot be attached to a model without weights."""
    return is_made_from_base_weights(read_json(adapter / ADAPTER_CONFIG_FILE))


def is_made_from_base_weights(settings: Mapping[str, Any]) -> bool:
    """The same of adapter_config.json."""
    return str(settings.get("peft_type")) in ADAPTER_FROM_BASE_WEIGHTS

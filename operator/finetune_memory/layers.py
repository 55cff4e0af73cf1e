"""Reads the layers of a ModelShape, and sorts each layer's parts by role: linear layers with their adapters, norms, experts.

A module's role is recognised by the last part of its name and the shape of its weight, so unknown models can also be read.
activations.py counts the bytes that these parts keep, pace.py the time that they take; describe.py needs the layers' names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from finetune_memory.model_shape import LINEAR, ModelShape, ParameterShape

OUTPUTS = frozenset({"o_proj", "out_proj", "c_proj", "dense", "wo", "down_proj", "fc2", "dense_4h_to_h", "w2"})
"""Last parts of the names of linear layers that end a block and whose input no other layer of the block reads."""
_LAYER = re.compile(r"^(.*?\.)(\d+)\.")
_WRAPPED = (".base_layer", ".original_module", ".modules_to_save.default")


@dataclass(frozen=True)
class Linear:
    """A linear module in one of the model's layers, with its adapter."""

    name: str
    inputs: int
    outputs: int
    is_trained: bool
    rank: int
    """Rank of the adapter; 0 if there is none."""
    adapter_dtype: str
    has_magnitude: bool

    @property
    def parent(self) -> str:
        """Name of the block to which the module belongs."""
        return self.name.rpartition(".")[0]

    @property
    def last(self) -> str:
        """The last part of the module's name."""
        return self.name.rpartition(".")[2]

    @property
    def is_output(self) -> bool:
        """Whether the module ends its block."""
        return self.last in OUTPUTS

    @property
    def is_attention(self) -> bool:
        """Whether the module is a part of attention."""
        return "attn" in self.parent or "attention" in self.parent


@dataclass(frozen=True)
class Norm:
    """A normalisation in one of the model's layers."""

    name: str
    size: int
    is_trained: bool
    has_bias: bool
    """Whether there is a bias, which only torch's own LayerNorm has."""


@dataclass(frozen=True)
class Layer:
    """One layer of the model."""

    linears: tuple[Linear, ...]
    norms: tuple[Norm, ...]
    experts: tuple[ParameterShape, ...]
    expert_factors: int
    """Number of values in the adapters on stacked weights of experts."""
    factor_dtype: str
    trained_bytes: int


def read_layers(shape: ModelShape) -> tuple[Layer, ...]:
    """Read the layers in the model's longest list of layers, in order."""
    return tuple(map(_read_layer, _longest_list(shape.parameters).values()))


def layer_names(parameters: Sequence[ParameterShape]) -> list[str]:
    """List the names of the modules of the longest list of layers."""
    return list(_longest_list(parameters))


def _longest_list(parameters: Sequence[ParameterShape]) -> dict[str, list[ParameterShape]]:
    """Return the parameters of each layer in the longest list of layers, by the layer's name."""
    lists: dict[str, dict[int, list[ParameterShape]]] = {}
    for parameter in parameters:
        if match := _LAYER.match(parameter.name):
            lists.setdefault(match.group(1), {}).setdefault(int(match.group(2)), []).append(parameter)
    name, layers = max(lists.items(), key=lambda item: len(item[1]), default=("", {}))
    return {f"{name}{number}": layers[number] for number in sorted(layers)}


def _read_layer(parameters: Sequence[ParameterShape]) -> Layer:
    weights: dict[str, ParameterShape] = {}
    ranks: dict[str, tuple[int, str]] = {}
    magnitudes, biases, trained = set(), set(), set()
    experts, expert_factors, factor_dtype = [], 0, "float32"
    for parameter in parameters:
        name = _LAYER.sub("", parameter.name)
        module, _, last = name.rpartition(".")
        base = module.split(".lora_")[0]
        for wrapper in _WRAPPED:
            base = base.replace(wrapper, "")
        if (".lora_A." in name or ".lora_B." in name) and "experts" in module:
            expert_factors, factor_dtype = expert_factors + parameter.numel, parameter.dtype
        elif ".lora_A." in name:
            # Only the first adapter, the trained one, counts: the input of a frozen one is not kept for a gradient.
            ranks.setdefault(base, (parameter.shape[0], parameter.dtype))
        elif ".lora_magnitude_vector." in name:
            magnitudes.add(base)
        elif len(parameter.shape) == 3:
            experts.append(parameter)
        elif last == "weight" and ".lora_" not in name:
            if parameter.is_trained or base not in weights:
                weights[base] = parameter
            if parameter.is_trained:
                trained.add(base)
        elif last == "bias":
            biases.add(base)
    linears, norms = [], []
    for name, weight in weights.items():
        rank, dtype = ranks.get(name, (0, "float32"))
        if len(weight.shape) == 1:
            norms.append(Norm(name, weight.shape[0], name in trained, name in biases))
        elif weight.kind in LINEAR or name in ranks:
            outputs, inputs = reversed(weight.shape) if weight.kind == "transposed" else weight.shape
            linears.append(Linear(name, inputs, outputs, name in trained, rank, dtype, name in magnitudes))
    trained_bytes = sum(parameter.num_bytes for parameter in parameters if parameter.is_trained)
    return Layer(tuple(linears), tuple(norms), tuple(experts), expert_factors, factor_dtype, trained_bytes)

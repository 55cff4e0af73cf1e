"""ModelShape -> its layers, with the parts of each by their roles: linear layers and their adapters, norms, experts.

Roles of modules are known by their last names and by the shapes of their weights, so that layers of other models find their
place, too. activations.py says what these parts keep, pace.py how long they take; describe.py asks for the
names of the layers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from finetune_memory.model_shape import LINEAR, ModelShape, ParameterShape

OUTPUTS = frozenset({"o_proj", "out_proj", "c_proj", "dense", "wo", "down_proj", "fc2", "dense_4h_to_h", "w2"})
"""Last names of the layers that end a block and have an input of their own."""
_LAYER = re.compile(r"^(.*?\.)(\d+)\.")
_WRAPPED = (".base_layer", ".original_module", ".modules_to_save.default")


@dataclass(frozen=True)
class Linear:
    """A linear layer of a layer of the model, with what is trained of it."""

    name: str
    inputs: int
    outputs: int
    is_trained: bool
    rank: int
    """Of its adapter; 0: none."""
    adapter_dtype: str
    has_magnitude: bool

    @property
    def parent(self) -> str:
        """Name of the block that it is a part of."""
        return self.name.rpartition(".")[0]

    @property
    def last(self) -> str:
        """The last part of its name."""
        return self.name.rpartition(".")[2]

    @property
    def is_output(self) -> bool:
        """Whether it ends its block."""
        return self.last in OUTPUTS

    @property
    def is_attention(self) -> bool:
        """Whether it is a part of attention."""
        return "attn" in self.parent or "attention" in self.parent


@dataclass(frozen=True)
class Norm:
    """A normalisation of a layer of the model."""

    name: str
    size: int
    is_trained: bool
    has_bias: bool
    """torch's own LayerNorm."""


@dataclass(frozen=True)
class Layer:
    """One layer of the model."""

    linears: tuple[Linear, ...]
    norms: tuple[Norm, ...]
    experts: tuple[ParameterShape, ...]
    expert_factors: int
    """Values of adapters on stacked weights of experts."""
    factor_dtype: str
    trained_bytes: int


def read_layers(shape: ModelShape) -> tuple[Layer, ...]:
    """The layers of the model's longest list, in order."""
    return tuple(read_layer(parameters) for parameters in _layers_of(shape))


def _layers_of(shape: ModelShape) -> list[list[ParameterShape]]:
    lists: dict[str, dict[int, list[ParameterShape]]] = {}
    for each in shape.parameters:
        if found := _LAYER.match(each.name):
            lists.setdefault(found.group(1), {}).setdefault(int(found.group(2)), []).append(each)
    if not lists:
        return []
    longest = max(lists.values(), key=len)
    return [longest[number] for number in sorted(longest)]


def layer_names(parameters: Sequence[ParameterShape]) -> list[str]:
    """Names of the modules of the longest list of layers."""
    lists: dict[str, dict[int, None]] = {}
    for each in parameters:
        if found := _LAYER.match(each.name):
            lists.setdefault(found.group(1), {})[int(found.group(2))] = None
    longest = max(lists.items(), key=lambda item: len(item[1]), default=("", {}))
    return [f"{longest[0]}{number}" for number in longest[1]]


def read_layer(parameters: Sequence[ParameterShape]) -> Layer:
    """The parts of a layer by their roles."""
    weights: dict[str, ParameterShape] = {}
    ranks: dict[str, tuple[int, str]] = {}
    magnitudes, biases, trained = set(), set(), set()
    experts, expert_factors, factor_dtype = [], 0, "float32"
    for each in parameters:
        name = _LAYER.sub("", each.name)
        module, _, last = name.rpartition(".")
        base = module.split(".lora_")[0]
        for wrapper in _WRAPPED:
            base = base.replace(wrapper, "")
        if (".lora_A." in name or ".lora_B." in name) and "experts" in module:
            expert_factors, factor_dtype = expert_factors + each.numel, each.dtype
        elif ".lora_A." in name:
            # The first is the trained one: what a frozen one reads is not kept for its gradient.
            ranks.setdefault(base, (each.shape[0], each.dtype))
        elif ".lora_magnitude_vector." in name:
            magnitudes.add(base)
        elif len(each.shape) == 3:
            experts.append(each)
        elif last == "weight" and ".lora_" not in name:
            if each.is_trained or base not in weights:
                weights[base] = each
            if each.is_trained:
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
    trained_bytes = sum(each.num_bytes for each in parameters if each.is_trained)
    return Layer(tuple(linears), tuple(norms), tuple(experts), expert_factors, factor_dtype, trained_bytes)

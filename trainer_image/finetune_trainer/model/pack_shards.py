"""A 4-bit base of which each rank keeps its shard: weights are packed one at a time, each by one rank for all.

bitsandbytes 0.50 packs 64 values after each other, whatever rows they are in. Double quantisation takes the mean of all scales of
a weight off and packs them in blocks of 256, so codes can be made piece by piece, but scales only of a whole weight: a rank that
packed its own shard alone would get others. So ranks take turns. Each packs one weight of as many as there are ranks, and sends
codes and scales to the others, which keep their shard of the codes and all scales (decision 0014). With DoRA also the norms of
the rows as the layer unpacks them, at which magnitudes start.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from transformers.pytorch_utils import Conv1D

from finetune_job.module_names import ADAPTER
from finetune_memory.adapters import BLOCK_SIZE, NESTED_BLOCK_SIZE
from finetune_trainer.checkpoint.state import ParameterRange
from finetune_trainer.model.invariants import MAGNITUDE, check_norms
from finetune_trainer.model.load_shards import base_name, initial_magnitudes, read_into
from finetune_trainer.ranks.gang import Gang
from finetune_trainer.weights.headers import TensorHeader

PIECE_VALUES = 1 << 21
"""Read and packed at a time: a whole number of blocks. On a CPU a piece takes about 25 bytes a value while it is packed."""


@dataclass(frozen=True)
class OpenMagnitude:
    """A magnitude of DoRA that is to start at the norms of a weight as its layer unpacks it."""

    layer: str
    """Name of PEFT's layer."""
    a: torch.Tensor
    b: torch.Tensor
    """The layer's matrices in the element type in which PEFT attaches them, whole."""
    scaling: float

    @property
    def parameter(self) -> str:
        """Its name in the model."""
        return f"{self.layer}.{MAGNITUDE}.{ADAPTER}.weight"


@dataclass(frozen=True)
class PackedLayer:
    """A 4-bit layer whose weight is still to come."""

    module: Any
    """bitsandbytes' Linear4bit."""
    header: TensorHeader
    """Where the weight is stored."""
    is_transposed: bool
    """Whether it is stored as [inputs, outputs], and turned before it is packed."""
    quant_type: str
    is_nested: bool
    """Whether the scales are packed themselves."""
    loaded: torch.dtype
    """Element type in which it is loaded before it is packed."""
    magnitude: OpenMagnitude | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight as the layer multiplies by it: [outputs, inputs]."""
        return self.header.shape[::-1] if self.is_transposed else self.header.shape


def packed_layers(model: nn.Module, headers: Mapping[str, TensorHeader], loaded: torch.dtype) -> dict[str, PackedLayer]:
    """The 4-bit layers of `model` by the names of their weights, in the order of the names. Call before sharding.

    `loaded`: element type in which the base is loaded.
    """
    from bitsandbytes.nn import Linear4bit

    found, modules = {}, dict(model.named_modules())
    for name, module in sorted(modules.items()):
        if isinstance(module, Linear4bit):
            found[f"{name}.weight"] = PackedLayer(
                module=module,
                header=headers[base_name(f"{name}.weight")],
                is_transposed=issubclass(module.source_cls, Conv1D),
                quant_type=module.weight.quant_type,
                is_nested=module.weight.compress_statistics,
                loaded=loaded,
                magnitude=_open_magnitude(name.removesuffix(".base_layer"), modules, module.compute_dtype),
            )
    return found


def _open_magnitude(name: str, modules: Mapping[str, nn.Module], attached: torch.dtype) -> OpenMagnitude | None:
    layer = modules[name]
    if not isinstance(layer, LoraLayer) or ADAPTER not in layer.lora_magnitude_vector:
        return None
    a, b = (factor[ADAPTER].weight.detach() for factor in (layer.lora_A, layer.lora_B))
    # Copies: sharding frees or cuts the originals.
    return OpenMagnitude(name, a.to(attached, copy=True), b.to(attached, copy=True), layer.scaling[ADAPTER])


def fill_packed(layers: Mapping[str, PackedLayer], found: Sequence[ParameterRange], gang: Gang) -> None:
    """Fill this rank's `found` pieces of the packed weights of `layers` and of their magnitudes, and give each layer its scales.

    Call after sharding, on all ranks together. Raises ModelError if the files end early, ConfigError for a magnitude of zero.
    """
    own = {piece.name: piece for piece in found}
    for name, weight in packed_by_turns(layers, gang):
        layers[name].module.quant_state = weight.state()
        if (magnitude := layers[name].magnitude) is not None:
            check_norms(magnitude.layer, weight.norms.cpu(), (magnitude.a.cpu(), magnitude.b.cpu()), magnitude.scaling)
            piece = own[magnitude.parameter]
            piece.parameter_values().copy_(weight.norms[piece.start : piece.stop])
        piece = own[name]
        if piece.stop > piece.start:
            # Bytes, because in the element type of storage some of them stand for no number, and copies may change those.
            shard = piece.parameter_values().view(torch.uint8)
            start = piece.start * piece.holder.dtype.itemsize
            shard.copy_(weight.codes[start : start + len(shard)])
        # Else it would be there until the one after next is.
        del weight


def packed_by_turns(layers: Mapping[str, PackedLayer], gang: Gang) -> Iterator[tuple[str, PackedWeight]]:
    """Each layer's packed weight on this rank's device, of which at most two are in memory. Called by all ranks together."""
    names = list(layers)
    for first in range(0, len(names), gang.world_size):
        group = names[first : first + gang.world_size]
        own = None
        if gang.rank < len(group):
            own = PackedWeight(layers[group[gang.rank]], gang.device)
            own.pack()
        for source, name in enumerate(group):
            weight = own if own is not None and source == gang.rank else PackedWeight(layers[name], gang.device)
            dist.broadcast(weight.bytes, src=source)
            yield name, weight
            del weight


class PackedWeight:
    """A packed weight in one tensor of bytes: DoRA's norms of its rows, the mean of its scales, their scales, they, the codes."""

    def __init__(self, layer: PackedLayer, device: torch.device) -> None:
        self.layer = layer
        values = math.prod(layer.shape)
        scales = -(-values // BLOCK_SIZE)
        width = torch.float32.itemsize
        norms = 0 if layer.magnitude is None else layer.shape[0] * width
        sizes = (width, -(-scales // NESTED_BLOCK_SIZE) * width, scales) if layer.is_nested else (0, 0, scales * width)
        self.bytes = torch.empty(norms + sum(sizes) + -(-values // 2), dtype=torch.uint8, device=device)
        """What goes from rank to rank."""
        of_rows, mean, of_scales, held, self.codes = torch.split(self.bytes, [norms, *sizes, -(-values // 2)])
        self.norms = of_rows.view(torch.float32)
        self._mean, self._of_scales = mean.view(torch.float32), of_scales.view(torch.float32)
        self._scales = held if layer.is_nested else held.view(torch.float32)

    def pack(self) -> None:
        """Read the weight piece by piece, and pack it as bitsandbytes packs it whole (functional.py, quantize_4bit)."""
        from bitsandbytes import functional

        layer, first = self.layer, 0
        scales = torch.empty(len(self._scales), dtype=torch.float32, device=self.bytes.device)
        for values in self._values():
            codes, largest = torch.ops.bitsandbytes.quantize_4bit.default(values, BLOCK_SIZE, layer.quant_type, torch.uint8)
            self.codes[first // 2 : first // 2 + len(codes)].copy_(codes.view(-1))
            scales[first // BLOCK_SIZE : first // BLOCK_SIZE + len(largest)].copy_(largest)
            first += len(values)
        if layer.is_nested:
            mean = scales.mean()
            held, state = functional.quantize_blockwise(scales - mean, blocksize=NESTED_BLOCK_SIZE)
            self._mean.copy_(mean)
            self._of_scales.copy_(state.absmax)
            self._scales.copy_(held)
        else:
            self._scales.copy_(scales)
        if (magnitude := layer.magnitude) is not None:
            device = self.bytes.device
            unpacked = functional.dequantize_4bit(self.codes.view(-1, 1), self.state())
            # Rounded as PEFT rounds them, which float32 holds exactly.
            self.norms.copy_(initial_magnitudes(unpacked, magnitude.a.to(device), magnitude.b.to(device), magnitude.scaling))

    def _values(self) -> Iterator[torch.Tensor]:
        """All values, one after the other, in pieces."""
        layer, device = self.layer, self.bytes.device
        count = math.prod(layer.shape)
        if layer.is_transposed:
            whole = torch.empty(layer.header.shape, dtype=layer.loaded)
            read_into(layer.header, 0, whole.view(-1), layer.loaded)
            for piece in torch.split(whole.T.contiguous().view(-1), PIECE_VALUES):
                yield piece.to(device)
            return
        for first in range(0, count, PIECE_VALUES):
            piece = torch.empty(min(PIECE_VALUES, count - first), dtype=layer.loaded)
            read_into(layer.header, first, piece, layer.loaded)
            yield piece.to(device)

    def state(self) -> Any:
        """What a layer unpacks the codes by: a QuantState of bitsandbytes, which keeps none of the codes in memory."""
        from bitsandbytes import functional

        layer, device = self.layer, self.bytes.device
        kind: Any = functional.QuantState
        nested = None
        if layer.is_nested:
            nested = kind(
                absmax=self._of_scales.clone(),
                code=functional.create_dynamic_map().to(device),
                blocksize=NESTED_BLOCK_SIZE,
                dtype=torch.float32,
            )
        return kind(
            absmax=self._scales.clone(),
            shape=torch.Size(layer.shape),
            code=functional.get_4bit_type(layer.quant_type, device=device),
            blocksize=BLOCK_SIZE,
            quant_type=layer.quant_type,
            dtype=layer.loaded,
            offset=self._mean.clone().view(()) if layer.is_nested else None,
            state2=nested,
        )

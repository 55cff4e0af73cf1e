"""Packs a 4-bit base model that is sharded over ranks: each weight is packed by one rank for all ranks.

bitsandbytes 0.50 packs blocks of 64 consecutive values, which may span rows. Double quantisation subtracts the mean of all scales
of a weight and packs scales in blocks of 256. So codes can be computed piece by piece, but scales only for a whole weight: a rank
that packed only its shard would get other scales. Ranks therefore take turns: each packs one weight of a group and sends codes
and scales to the others, which keep all scales and their shard of the codes (decision 0014). With DoRA, it also sends the row
norms of the unpacked weight, which are the initial magnitudes.
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
"""Number of values read and packed at a time, a multiple of the block size. On a CPU, packing takes about 25 bytes per value."""


@dataclass(frozen=True)
class OpenMagnitude:
    """A magnitude of DoRA that must start at the norms of a weight that was packed and unpacked."""

    layer: str
    """Name of PEFT's layer."""
    a: torch.Tensor
    b: torch.Tensor
    """The adapter's whole matrices, in the element type in which PEFT attaches them."""
    scaling: float

    @property
    def parameter(self) -> str:
        """The name of the magnitude in the model."""
        return f"{self.layer}.{MAGNITUDE}.{ADAPTER}.weight"


@dataclass(frozen=True)
class PackedLayer:
    """A 4-bit layer whose weight is not loaded yet."""

    module: Any
    """bitsandbytes' Linear4bit."""
    header: TensorHeader
    """The place where the weight is stored."""
    is_transposed: bool
    """Whether the weight is stored as [inputs, outputs], and is transposed before it is packed."""
    quant_type: str
    is_nested: bool
    """Whether the scales are also packed."""
    loaded: torch.dtype
    """Element type in which the weight is loaded before it is packed."""
    magnitude: OpenMagnitude | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight in the layer's product: [outputs, inputs]."""
        return self.header.shape[::-1] if self.is_transposed else self.header.shape


def packed_layers(model: nn.Module, headers: Mapping[str, TensorHeader], loaded: torch.dtype) -> dict[str, PackedLayer]:
    """Return the 4-bit layers of `model`, sorted by the names of their weights. Call this before sharding.

    `loaded`: element type in which the base is loaded.
    """
    from bitsandbytes.nn import Linear4bit

    layers, modules = {}, dict(model.named_modules())
    for name, module in sorted(modules.items()):
        if isinstance(module, Linear4bit):
            layers[f"{name}.weight"] = PackedLayer(
                module=module,
                header=headers[base_name(f"{name}.weight")],
                is_transposed=issubclass(module.source_cls, Conv1D),
                quant_type=module.weight.quant_type,
                is_nested=module.weight.compress_statistics,
                loaded=loaded,
                magnitude=_open_magnitude(name.removesuffix(".base_layer"), modules, module.compute_dtype),
            )
    return layers


def _open_magnitude(name: str, modules: Mapping[str, nn.Module], attached: torch.dtype) -> OpenMagnitude | None:
    layer = modules[name]
    if not isinstance(layer, LoraLayer) or ADAPTER not in layer.lora_magnitude_vector:
        return None
    a, b = (factor[ADAPTER].weight.detach() for factor in (layer.lora_A, layer.lora_B))
    # Copied, because sharding frees or cuts the original tensors.
    return OpenMagnitude(name, a.to(attached, copy=True), b.to(attached, copy=True), layer.scaling[ADAPTER])


def fill_packed(layers: Mapping[str, PackedLayer], pieces: Sequence[ParameterRange], gang: Gang) -> None:
    """Fill this rank's `pieces` of packed weights and their magnitudes, and give each layer its scales.

    All ranks call this together, after sharding. Raises ModelError if a file ends early, ConfigError for a zero magnitude.
    """
    own = {piece.name: piece for piece in pieces}
    for name, weight in packed_by_turns(layers, gang):
        layers[name].module.quant_state = weight.state()
        if (magnitude := layers[name].magnitude) is not None:
            check_norms(magnitude.layer, weight.norms.cpu(), (magnitude.a.cpu(), magnitude.b.cpu()), magnitude.scaling)
            piece = own[magnitude.parameter]
            piece.parameter_values().copy_(weight.norms[piece.start : piece.stop])
        piece = own[name]
        if piece.stop > piece.start:
            # Copied as bytes: some codes are not valid numbers in the storage's element type, and a copy may change such numbers.
            shard = piece.parameter_values().view(torch.uint8)
            start = piece.start * piece.holder.dtype.itemsize
            shard.copy_(weight.codes[start : start + len(shard)])
        # Otherwise this weight would stay in memory while the next one is packed.
        del weight


def packed_by_turns(layers: Mapping[str, PackedLayer], gang: Gang) -> Iterator[tuple[str, PackedWeight]]:
    """Yield each layer's packed weight on this rank's device, with at most two in memory. All ranks call this together."""
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
    """A packed weight in one tensor of bytes: DoRA's row norms, the scales' mean, the scales of the scales, scales, codes."""

    def __init__(self, layer: PackedLayer, device: torch.device) -> None:
        self.layer = layer
        values = math.prod(layer.shape)
        scales = -(-values // BLOCK_SIZE)
        width = torch.float32.itemsize
        norms = 0 if layer.magnitude is None else layer.shape[0] * width
        sizes = (width, -(-scales // NESTED_BLOCK_SIZE) * width, scales) if layer.is_nested else (0, 0, scales * width)
        self.bytes = torch.empty(norms + sum(sizes) + -(-values // 2), dtype=torch.uint8, device=device)
        """The bytes that ranks send to each other."""
        of_rows, mean, of_scales, own_scales, self.codes = torch.split(self.bytes, [norms, *sizes, -(-values // 2)])
        self.norms = of_rows.view(torch.float32)
        self._mean, self._of_scales = mean.view(torch.float32), of_scales.view(torch.float32)
        self._scales = own_scales if layer.is_nested else own_scales.view(torch.float32)

    def pack(self) -> None:
        """Read and pack the weight in pieces, with the result that bitsandbytes' quantize_4bit gives for the whole weight."""
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
            packed_scales, state = functional.quantize_blockwise(scales - mean, blocksize=NESTED_BLOCK_SIZE)
            self._mean.copy_(mean)
            self._of_scales.copy_(state.absmax)
            self._scales.copy_(packed_scales)
        else:
            self._scales.copy_(scales)
        if (magnitude := layer.magnitude) is not None:
            device = self.bytes.device
            unpacked = functional.dequantize_4bit(self.codes.view(-1, 1), self.state())
            # PEFT computes these norms, so they are rounded as in PEFT. Storing them in float32 loses nothing.
            self.norms.copy_(initial_magnitudes(unpacked, magnitude.a.to(device), magnitude.b.to(device), magnitude.scaling))

    def _values(self) -> Iterator[torch.Tensor]:
        """Yield all values of the weight in order, in pieces."""
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
        """Return bitsandbytes' QuantState, with which a layer unpacks the codes. It does not keep the codes in memory."""
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

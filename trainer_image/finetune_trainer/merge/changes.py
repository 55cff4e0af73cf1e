"""Describes changes to one matrix of the base model as data. The planner creates them, and `steps` carries them out.

A stored tensor is one matrix, or several if experts are stacked in it. Each matrix has a tuple of changes, which are applied in
order. Changes refer to tensors by their headers, so that planning reads no values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from finetune_trainer.weights.headers import TensorHeader
from finetune_trainer.weights.stored import ExpertPart


class Orientation(StrEnum):
    """How the stored weight relates to B@A, which has the shape (out, in)."""

    LINEAR = "Linear"  # weight (out, in)
    CONV1D = "Conv1D"  # weight (in, out): transposed
    EMBEDDING = "Embedding"  # weight (num_embeddings, dim): transposed, and B@A is rounded before it is added


@dataclass(frozen=True)
class LowRank:
    """Adds scaling * B@A to a weight; with `magnitude`, the sum is rescaled as in DoRA.

    a: (r, in), b: (out, r), magnitude: (out,). With `part`, a and b hold the factors of all experts.
    """

    a: TensorHeader
    b: TensorHeader
    magnitude: TensorHeader | None
    scaling: float
    orientation: Orientation
    part: ExpertPart | None = None


@dataclass(frozen=True)
class Addition:
    """Adds scaling * tensor, which is the bias of lora_B and has the parameter's shape."""

    tensor: TensorHeader
    scaling: float


@dataclass(frozen=True)
class TokenRows:
    """Replaces the rows `indices` of an embedding by the rows of `tensor`, in order."""

    indices: tuple[int, ...]
    tensor: TensorHeader


@dataclass(frozen=True)
class ModuleMerge:
    """Merges a module with PEFT's own layer. `parameter` is the module's changed matrix."""

    module: str
    """Name of the module inside the base model."""
    layer: str
    """Class of the base layer, such as Linear, Conv1D, Embedding or Conv2d."""
    parameter: str
    base: Mapping[str, TensorHeader]
    """Stored tensors of the module's parameters, by the parameter's name."""
    adapter: Mapping[str, TensorHeader]
    """The module's adapter tensors, by their names in the file."""
    config: Mapping[str, Any]
    """Content of adapter_config.json."""
    shared_extent: tuple[int, int] | None = None
    """(out, in): the largest sizes among all adapted layers, if the layers share projections of this size (VeRA)."""


@dataclass(frozen=True)
class Quantization:
    """Quantizes a weight and dequantizes it again, as a bitsandbytes layer with these settings does when it computes."""

    quant_type: str
    """Type of the codes, nf4 or fp4."""
    double_quant: bool
    load_dtype: str
    """Dtype in which the model was loaded before quantization: bfloat16, float16 or float32."""
    compute_dtype: str
    """Dtype into which the layer dequantizes its weight: bfloat16, float16 or float32."""
    is_transposed: bool = False
    """Whether the weight is stored as (in, out), but quantized as (out, in), as for Conv1D."""


Change = LowRank | Addition | TokenRows | ModuleMerge | Quantization


def read_by(change: Change) -> tuple[TensorHeader, ...]:
    """Return the adapter's tensors that are read to carry out `change`."""
    match change:
        case LowRank():
            return tuple(tensor for tensor in (change.a, change.b, change.magnitude) if tensor is not None)
        case Addition() | TokenRows():
            return (change.tensor,)
        case ModuleMerge():
            return tuple(change.adapter.values())
        case Quantization():
            return ()

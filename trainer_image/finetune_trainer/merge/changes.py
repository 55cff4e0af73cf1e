"""Changes of one matrix of the base model by an adapter, as data: the planner makes them, `steps` carries them out.

A stored tensor is one matrix or, where experts are stacked in it, several; each has a tuple of changes, applied in order. Headers
name the tensors, so that nothing is read early.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from finetune_trainer.weights.headers import TensorHeader
from finetune_trainer.weights.stored import ExpertPart


class Orientation(StrEnum):
    """How B@A, of shape (out, in), lies on the stored weight."""

    LINEAR = "Linear"  # weight (out, in)
    CONV1D = "Conv1D"  # weight (in, out): transposed
    EMBEDDING = "Embedding"  # weight (num_embeddings, dim): transposed, and rounded before it is added


@dataclass(frozen=True)
class LowRank:
    """W += scaling * B@A, with `magnitude` rescaled as DoRA does. a: (r, in), b: (out, r), magnitude: one per output."""

    a: TensorHeader
    b: TensorHeader
    magnitude: TensorHeader | None
    scaling: float
    orientation: Orientation
    part: ExpertPart | None = None


@dataclass(frozen=True)
class Addition:
    """W += scaling * tensor of the same shape: the bias on lora_B."""

    tensor: TensorHeader
    scaling: float


@dataclass(frozen=True)
class TokenRows:
    """Rows `indices` are replaced by those of `tensor`, in order: trained tokens of an embedding."""

    indices: tuple[int, ...]
    tensor: TensorHeader


@dataclass(frozen=True)
class ModuleMerge:
    """PEFT's own layer of this method merges the module; the changed matrix is its `parameter`."""

    module: str
    """Name of the module inside the base model."""
    layer: str
    """Class of the base layer: Linear, Conv1D, Embedding, Conv2d and so on."""
    parameter: str
    base: Mapping[str, TensorHeader]
    """The module's parameters by name, as stored."""
    adapter: Mapping[str, TensorHeader]
    """The module's adapter tensors, by their names in the file."""
    config: Mapping[str, Any]
    """Content of adapter_config.json."""
    shared_extent: tuple[int, int] | None = None
    """(out, in), each the largest of all adapted layers, if these share projections of that size."""

    def __hash__(self) -> int:
        return hash((self.module, self.parameter, tuple(self.adapter)))


@dataclass(frozen=True)
class Quantization:
    """W becomes the weight with which a bitsandbytes layer of these settings computes: quantized and dequantized."""

    quant_type: str
    """Type of the codes, nf4 or fp4."""
    double_quant: bool
    load_dtype: str
    """Dtype in which the model was loaded before quantization; this and the next are bfloat16, float16 or float32."""
    compute_dtype: str
    """Dtype into which the layer dequantizes its weight."""
    is_transposed: bool = False
    """Whether the weight is stored as (in, out), but quantized as (out, in): Conv1D."""


Change = LowRank | Addition | TokenRows | ModuleMerge | Quantization


def read_by(change: Change) -> tuple[TensorHeader, ...]:
    """The adapter's tensors that are read to carry out `change`."""
    match change:
        case LowRank():
            return tuple(tensor for tensor in (change.a, change.b, change.magnitude) if tensor is not None)
        case Addition() | TokenRows():
            return (change.tensor,)
        case ModuleMerge():
            return tuple(change.adapter.values())
        case Quantization():
            return ()

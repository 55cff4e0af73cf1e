"""Quantizes a weight to 4 bits and dequantizes it on the CPU, which gives the weight that bitsandbytes' layers compute with.

bitsandbytes 0.50 turns every 64 consecutive values, even across rows, into 4-bit codes and their largest absolute value. Double
quantization also quantizes these maxima: it subtracts their mean, and turns blocks of 256 into 8-bit codes. A layer dequantizes
directly into its compute dtype (bitsandbytes/functional.py quantize_4bit, backends/default/ops.py gemm_4bit). So values can be
quantized in pieces, but with double quantization none can be dequantized before the whole matrix is quantized. Memory holds the
matrix, its codes, which take a quarter of that, and the temporaries of a piece.

On a CPU with AVX-512, bitsandbytes' own layers wrongly dequantize rows whose width is not a multiple of 64, in every training
step. Here these rows have the correct values, as on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from bitsandbytes import functional

from finetune_trainer.merge.changes import Quantization
from finetune_trainer.merge.steps.step import Scratch, WholeMatrix
from finetune_trainer.weights.rounding import all_finite, round_into

BLOCK_VALUES = 64
"""Number of values that are quantized as one block. This is the default of bitsandbytes' layers, which transformers keeps."""
PIECE_VALUES = 1 << 20
"""Number of values that are quantized at once, a multiple of BLOCK_VALUES."""
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def dequantized(weight: torch.Tensor, quantization: Quantization) -> torch.Tensor:
    """Return the weight with which a bitsandbytes layer with these settings computes if it is made from the stored `weight`.

    weight: (rows, columns), in any floating dtype. The result has the same shape and the layer's compute dtype.
    """
    out = torch.empty(weight.shape, dtype=_DTYPES[quantization.compute_dtype])
    _unpack_into(weight, quantization, out)
    return out


def _unpack_into(weight: torch.Tensor, quantization: Quantization, out: torch.Tensor) -> None:
    if quantization.is_transposed:
        weight = weight.T.contiguous()
    values = weight.reshape(-1)
    load, compute = _DTYPES[quantization.load_dtype], _DTYPES[quantization.compute_dtype]
    packed, maxima = [], []
    for piece in torch.split(values, PIECE_VALUES):
        codes, absmax = torch.ops.bitsandbytes.quantize_4bit.default(
            piece.to(load), BLOCK_VALUES, quantization.quant_type, torch.uint8
        )
        packed.append(codes)
        maxima.append(absmax)
    absmax = torch.cat(maxima)
    if quantization.double_quant:
        offset = absmax.mean()
        absmax = functional.dequantize_blockwise(*functional.quantize_blockwise(absmax - offset, blocksize=256)) + offset
    # A transposed weight is dequantized in the layout in which it was quantized, and transposed back at the end.
    unpacked = out if not quantization.is_transposed else torch.empty(weight.shape, dtype=compute)
    target = unpacked.view(-1)
    first = 0
    for codes in packed:
        last = min(first + PIECE_VALUES, target.numel())
        blocks = slice(first // BLOCK_VALUES, -(-last // BLOCK_VALUES))
        # A byte holds two codes. If the number of values is odd, the last byte holds one code too many, which is cut off.
        piece = torch.ops.bitsandbytes.dequantize_4bit.default(
            codes, absmax[blocks], BLOCK_VALUES, quantization.quant_type, (2 * codes.numel(),), compute
        )
        target[first:last].copy_(piece.view(-1)[: last - first])
        first = last
    if quantization.is_transposed:
        out.copy_(unpacked.T)


@dataclass(frozen=True)
class QuantizationStep(WholeMatrix):
    """Quantizes and dequantizes one matrix."""

    quantization: Quantization
    compute: torch.dtype

    def apply(
        self,
        values: torch.Tensor,
        rows: tuple[int, int],  # noqa: ARG002 - all of them
        out: torch.Tensor,
        scratch: Scratch,  # noqa: ARG002 - as every step
    ) -> bool:
        if self.compute == out.dtype == _DTYPES[self.quantization.compute_dtype]:
            _unpack_into(values, self.quantization, out)
        else:
            round_into(dequantized(values, self.quantization), self.compute, out)
        return all_finite(out)

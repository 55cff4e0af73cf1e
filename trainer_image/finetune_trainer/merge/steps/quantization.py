"""W becomes the weight with which a 4-bit layer of bitsandbytes computes: quantized and dequantized, on the CPU.

bitsandbytes 0.50 quantizes 64 consecutive values, whatever rows they are in, to a 4-bit code each and their largest absolute
value, which double quantisation quantizes once more: mean subtracted, 256 to a block of 8-bit codes. A layer dequantizes directly
into its compute type (bitsandbytes/functional.py quantize_4bit, backends/default/ops.py gemm_4bit). So values can be quantized
piece by piece, but with double quantisation none can be dequantized before the last of the matrix is quantized: memory is the
matrix, a quarter of it in codes, and a piece's temporaries. On a CPU with AVX-512, bitsandbytes' own layers wrongly dequantize
rows whose width is no multiple of 64, in every step of a training; here they have their correct values, as on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from bitsandbytes import functional

from finetune_trainer.merge.changes import Quantization
from finetune_trainer.merge.steps.step import Scratch, WholeMatrix
from finetune_trainer.weights.rounding import all_finite, round_into

BLOCK_VALUES = 64
"""Number of values that share a largest absolute value: the default of bitsandbytes' layers, which transformers keeps."""
PIECE_VALUES = 1 << 20
"""Number of values that are quantized at once: a whole number of blocks."""
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def dequantized(weight: torch.Tensor, quantization: Quantization) -> torch.Tensor:
    """The weight with which a layer with these settings, made from the stored `weight`, computes.

    weight: (rows, columns), any floating dtype. The result has its shape and the layer's compute dtype.
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
        absmax = _doubly_quantized(absmax)
    # A transposed weight is dequantized in its quantized form, and transposed back at the end.
    turned = out if not quantization.is_transposed else torch.empty(weight.shape, dtype=compute)
    target = turned.view(-1)
    first = 0
    for codes in packed:
        last = min(first + PIECE_VALUES, target.numel())
        blocks = slice(first // BLOCK_VALUES, -(-last // BLOCK_VALUES))
        # Two codes to a byte: a last single value has a neighbour that is cut off.
        piece = torch.ops.bitsandbytes.dequantize_4bit.default(
            codes, absmax[blocks], BLOCK_VALUES, quantization.quant_type, (2 * codes.numel(),), compute
        )
        target[first:last].copy_(piece.view(-1)[: last - first])
        first = last
    if quantization.is_transposed:
        out.copy_(turned.T)


def _doubly_quantized(absmax: torch.Tensor) -> torch.Tensor:
    """The blocks' largest absolute values after double quantisation."""
    offset = absmax.mean()
    codes, state = functional.quantize_blockwise(absmax - offset, blocksize=256)
    deviations: torch.Tensor = functional.dequantize_blockwise(codes, state)
    return deviations + offset


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

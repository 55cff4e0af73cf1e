"""Dequantized weights have the bits with which layers of bitsandbytes compute."""

import bitsandbytes
import pytest
import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from torch.nn import functional

from finetune_trainer.merge.changes import Quantization
from finetune_trainer.merge.steps import quantization as step
from finetune_trainer.merge.steps.quantization import dequantized

DTYPES = ["bfloat16", "float16", "float32"]


def quantization(load: str = "bfloat16", compute: str = "bfloat16", kind: str = "nf4", *, double: bool = True) -> Quantization:
    return Quantization(kind, double_quant=double, load_dtype=load, compute_dtype=compute)


def weights(num_rows: int, num_columns: int, dtype: str = "bfloat16") -> torch.Tensor:
    torch.manual_seed(7)
    return (0.05 * torch.randn(num_rows, num_columns)).to(getattr(torch, dtype))


@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("load", DTYPES)
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_a_layer_computes_with_these_bits(
    kind: str, double: bool, load: str, compute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weight is quantized in many pieces, like large weights."""
    monkeypatch.setattr(step, "PIECE_VALUES", 64 * 50)
    weight, dtype = weights(200, 192, load), getattr(torch, compute)
    layer = Linear4bit(192, 200, bias=False, compute_dtype=dtype, compress_statistics=double, quant_type=kind)
    layer.weight = Params4bit(weight.clone(), requires_grad=False, compress_statistics=double, quant_type=kind)
    layer.to("cpu").train()
    computed = dequantized(weight, quantization(load, compute, kind, double=double))
    assert computed.dtype == dtype
    inputs = torch.randn(5, 192, dtype=dtype, requires_grad=True)
    assert torch.equal(layer(inputs), functional.linear(inputs, computed))
    assert torch.equal(layer(torch.eye(192, dtype=dtype, requires_grad=True)).T, computed)
    assert not torch.equal(computed, weight.to(dtype))


@pytest.mark.parametrize("shape", [(7, 33), (33, 7), (1, 1), (3, 64), (64, 96)])
def test_pieces_and_odd_shapes_have_the_values_that_were_packed(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weights(*shape)
    whole = dequantized(weight, quantization())
    monkeypatch.setattr(step, "PIECE_VALUES", 64)
    assert torch.equal(dequantized(weight, quantization()), whole)
    flat = weight.reshape(-1)
    padded = functional.pad(flat, (0, flat.numel() % 2))
    packed, state = bitsandbytes.functional.quantize_4bit(padded, quant_type="nf4", compress_statistics=True)
    assert torch.equal(bitsandbytes.functional.dequantize_4bit(packed, state).view(-1)[: flat.numel()].view(shape), whole)

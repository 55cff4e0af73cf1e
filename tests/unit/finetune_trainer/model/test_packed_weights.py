"""A 4-bit base trains right on a CPU: in training mode, after an evaluation, and whatever the width of its rows.

Against a plain base that holds the unpacked values, which are computed here value by value from the packed ones.
"""

from pathlib import Path
from typing import Any

import bitsandbytes.functional
import pytest
import torch
from torch import nn

from finetune_trainer.model.packed_weights import fix_cpu_unpacking, keep_biases
from tests.support.forked_ranks import Fault, run_gang, trained_files
from tests.support.tiny_model import run_context, tiny_spec, write_tiny_llama
from tests.unit.finetune_trainer.model.adapted_gang import AdapterCase, Trained, load, train_in_gang, train_plainly
from tests.unit.finetune_trainer.train.recorded_steps import distance

BLOCK = 64
WIDTHS = {"aligned": {"hidden_size": 64, "intermediate_size": 128}, "unaligned": {"hidden_size": 96, "intermediate_size": 160}}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "nf4-fsdp2": ("aligned", {}, {}),
    "nf4-fsdp1": ("aligned", {"quantStorage": "float32"}, {"version": 1}),
    "nf4-bytes": ("aligned", {"quantStorage": "uint8", "doubleQuant": False}, {}),
    "nf4-bfloat16": ("aligned", {"quantStorage": "bfloat16", "computeDtype": "float32"}, {}),
    "fp4-unaligned-fsdp2": ("unaligned", {"quantType": "fp4", "doubleQuant": False}, {}),
    "nf4-unaligned-fsdp1": ("unaligned", {}, {"version": 1, "useOrigParams": True, "peftWrapPolicy": False}),
}


def unpacked(weight: torch.Tensor, code: str, nested: bool) -> torch.Tensor:
    """The values that stand for `weight` in 4 bits: two codes a byte, blocks of 64 values whatever rows they lie in."""
    packed, state = bitsandbytes.functional.quantize_4bit(weight, blocksize=BLOCK, compress_statistics=nested, quant_type=code)
    largest = state.absmax
    if nested:
        largest = bitsandbytes.functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    pairs = packed.flatten()
    codes = torch.stack([pairs >> 4, pairs & 15], dim=1).flatten().long()
    blocks = torch.arange(weight.numel()) // BLOCK
    return (state.code.float()[codes] * largest.float()[blocks]).view(weight.shape)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    return {name: write_tiny_llama(root / name, **widths) for name, widths in WIDTHS.items()}


@pytest.fixture(scope="module")
def found(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    cases = {
        f"{name}{after}": AdapterCase(
            bases[base], {"type": "QLoRA", "lora": {"r": 4}, "quantization": quantization}, fsdp, evaluates_first=bool(after)
        )
        for name, (base, quantization, fsdp) in CASES.items()
        for after in ("", "-evaluated")
    }
    return train_in_gang(cases, tmp_path_factory.mktemp("gang"))


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_unpacked_values(bases: dict[str, Path], found: dict[str, Trained], name: str) -> None:
    base, quantization, _ = CASES[name]
    model = load(bases[base])
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and path != "lm_head":
            code, nested = quantization.get("quantType", "nf4"), quantization.get("doubleQuant", True)
            layer.weight.data = unpacked(layer.weight.data, code, nested)
    _, expected = train_plainly(model, AdapterCase(bases[base], {"type": "LoRA", "lora": {"r": 4}}))
    for after in ("", "-evaluated"):
        for gradients, wanted in zip(found[f"{name}{after}"].gradients, expected.gradients, strict=True):
            assert gradients.keys() == wanted.keys()
            for parameter, gradient in wanted.items():
                assert distance(gradients[parameter], gradient) <= 3e-6, (parameter, after)


@pytest.mark.parametrize("width", [16, 48, 64, 96, 100, 160])
@pytest.mark.parametrize("code", ["nf4", "fp4"])
def test_rows_of_any_width_are_unpacked_right(width: int, code: str) -> None:
    fix_cpu_unpacking(nn.Module())
    weight = torch.randn(16, width, generator=torch.Generator().manual_seed(width))
    packed, state = bitsandbytes.functional.quantize_4bit(weight, blocksize=BLOCK, quant_type=code)
    assert torch.allclose(bitsandbytes.functional.dequantize_4bit(packed, state), unpacked(weight, code, nested=False), atol=1e-6)


@pytest.mark.parametrize("kind", ["4 bits", "8 bits"])
def test_a_bias_stays_where_sharding_has_put_it(kind: str) -> None:
    """bitsandbytes would give it memory of its own in the input's type, which no later gathering fills."""
    layer: Any = (
        bitsandbytes.nn.Linear4bit(64, 32, compute_dtype=torch.float32)
        if kind == "4 bits"
        else bitsandbytes.nn.Linear8bitLt(64, 32, has_fp16_weights=False)
    ).to("cpu")
    layer.bias.data = layer.bias.data.half()
    place = layer.bias.data_ptr()
    inputs = torch.randn(3, 64)
    keep_biases(layer)
    before = layer(inputs)
    assert (layer.bias.dtype, layer.bias.data_ptr()) == (torch.float16, place)
    with torch.no_grad():
        layer.bias.add_(1)
    after = layer(inputs)
    after.sum().backward()
    assert torch.allclose(after, before + 1, atol=1e-2)
    assert torch.equal(layer.bias.grad, torch.full((32,), 3.0, dtype=torch.float16))


def test_a_bias_may_be_a_view_of_a_flat_parameter() -> None:
    """FSDP 1 takes the parameter away and puts a plain tensor in its place for each pass."""
    layer: Any = bitsandbytes.nn.Linear4bit(64, 32, compute_dtype=torch.float32).to("cpu")
    keep_biases(layer)
    inputs = torch.randn(3, 64)
    before = layer(inputs)
    view = layer.bias.detach() + 1
    del layer.bias
    layer.bias = view
    assert torch.allclose(layer(inputs), before + 1, atol=1e-6)
    assert layer.bias is view


def test_a_killed_run_that_evaluates_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    spec = tiny_spec(method={"type": "QLoRA"}, evaluation={"everySteps": 2}, merge={"enabled": False})
    contexts = [run_context(tmp_path / name, spec) for name in ("undisturbed", "killed")]
    assert run_gang(contexts[0]) == [0, 0]
    run_gang(contexts[1], [Fault("train.step:optimizer_step", call=4, rank=1)])
    assert run_gang(contexts[1]) == [0, 0]
    assert trained_files(contexts[1]) == trained_files(contexts[0])

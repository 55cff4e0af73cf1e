"""Merging into what a QLoRA adapter saw: the bits that layers of bitsandbytes compute with, for weights that transformers packs."""

from __future__ import annotations

from pathlib import Path

import bitsandbytes
import pytest
import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedConfig

from finetune_job.api.base import Dtype
from finetune_job.api.method import QuantStorage, QuantType
from finetune_job.plan.run_plan import QuantizationPlan
from finetune_trainer.merge.changes import Quantization
from finetune_trainer.merge.quantized_base import quantized_parameters, training_quantization
from finetune_trainer.merge.run import MergeOptions, merge_adapter
from finetune_trainer.merge.steps import quantization as step
from finetune_trainer.merge.steps.quantization import dequantized
from finetune_trainer.weights.errors import UnsupportedBaseError
from tests.unit.trainer_merge import tiny

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
    """Packed in many pieces, as large weights are."""
    monkeypatch.setattr(step, "PIECE_VALUES", 64 * 50)
    weight, dtype = weights(200, 192, load), getattr(torch, compute)
    layer = Linear4bit(192, 200, bias=False, compute_dtype=dtype, compress_statistics=double, quant_type=kind)
    layer.weight = Params4bit(weight.clone(), requires_grad=False, compress_statistics=double, quant_type=kind)
    layer.to("cpu").train()
    held = dequantized(weight, quantization(load, compute, kind, double=double))
    assert held.dtype == dtype
    inputs = torch.randn(5, 192, dtype=dtype, requires_grad=True)
    assert torch.equal(layer(inputs), functional.linear(inputs, held))
    assert torch.equal(layer(torch.eye(192, dtype=dtype, requires_grad=True)).T, held)
    assert not torch.equal(held, weight.to(dtype))


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


def test_a_transposed_weight_is_packed_turned() -> None:
    weight = weights(128, 64)
    turned = Quantization("nf4", double_quant=True, load_dtype="bfloat16", compute_dtype="bfloat16", is_transposed=True)
    assert torch.equal(dequantized(weight, turned), dequantized(weight.T.contiguous(), quantization()).T)
    assert not torch.equal(dequantized(weight, turned), dequantized(weight, quantization()))


def llama(*, tied: bool = False) -> PreTrainedConfig:
    """Rows of a multiple of 64 values: with others, bitsandbytes' own layers on a CPU unpack wrong values."""
    config = tiny.llama(tie_word_embeddings=tied)
    config.update({"hidden_size": 128, "intermediate_size": 640, "head_dim": 32})
    return config


def gpt2() -> PreTrainedConfig:
    config = tiny.gpt2()
    config.update({"n_embd": 128})
    return config


def packed_model(base: Path, double: bool = True) -> torch.nn.Module:
    """As the trainer loads it."""
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16, quantization_config=config, device_map={"": "cpu"})
    return model.train()


def seen_by_the_adapter(base: Path, directory: Path) -> Path:
    """A copy of the base with the weights that the packed model's layers multiply with."""
    tensors = load_file(base / "model.safetensors")
    for name, module in packed_model(base).named_modules():
        if isinstance(module, Linear4bit):
            module.bias = None
            seen = module(torch.eye(module.in_features, dtype=torch.bfloat16, requires_grad=True)).detach().T
            stored = tensors[f"{name}.weight"]
            tensors[f"{name}.weight"] = (seen if stored.shape == seen.shape and "c_" not in name else seen.T).contiguous()
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_bytes((base / "config.json").read_bytes())
    return directory


@pytest.mark.parametrize(
    ("config", "lora"),
    [
        (llama(), {"r": 8, "lora_alpha": 13, "target_modules": ["q_proj", "down_proj"]}),
        (llama(tied=True), {"r": 8, "use_dora": True, "target_modules": ["v_proj", "up_proj"], "modules_to_save": ["model.norm"]}),
        (gpt2(), {"r": 8, "fan_in_fan_out": True, "target_modules": ["c_attn", "c_proj"]}),
    ],
    ids=["llama", "tied llama with DoRA", "gpt2"],
)
def test_a_dequantized_merge_is_pefts_merge_into_what_the_adapter_saw(
    config: PreTrainedConfig, lora: dict[str, object], tmp_path: Path
) -> None:
    base = tiny.save_base(tmp_path / "base", config, torch.bfloat16)
    adapter = tiny.save_adapter(tmp_path / "adapter", base, LoraConfig(**lora))
    options = MergeOptions(
        base=base,
        adapters=(adapter,),
        output=tmp_path / "merged",
        dtype=None,
        max_shard_bytes=1 << 30,
        quantization=quantization(),
    )
    merge_adapter(options)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    reference = tiny.peft_merged(seen_by_the_adapter(base, tmp_path / "seen"), adapter)
    assert [name for name, tensor in merged.items() if not torch.equal(tensor, reference[name])] == []
    original = load_file(base / "model.safetensors")
    changed = {name for name, tensor in merged.items() if not torch.equal(tensor, original[name])}
    packed = {f"{name}.weight" for name, module in packed_model(base).named_modules() if isinstance(module, Linear4bit)}
    assert packed <= changed
    assert changed - packed <= {"model.norm.weight"}


@pytest.mark.parametrize("config", [llama(), llama(tied=True), gpt2()], ids=["llama", "tied llama", "gpt2"])
def test_the_weights_that_transformers_packs_are_known(config: PreTrainedConfig, tmp_path: Path) -> None:
    base = tiny.save_base(tmp_path / "base", config, torch.bfloat16)
    with torch.device("meta"):
        found = quantized_parameters(AutoModelForCausalLM.from_config(config))
    packed = {f"{name}.weight" for name, module in packed_model(base).named_modules() if isinstance(module, Linear4bit)}
    assert set(found) == packed
    assert "lm_head.weight" not in found
    assert set(found.values()) == {config.model_type == "gpt2"}


def test_what_a_plan_leaves_open_is_the_loaded_type() -> None:
    plan = QuantizationPlan(
        bits=4, quant_type=QuantType.FP4, double_quant=False, compute_dtype=None, quant_storage=QuantStorage.UINT8
    )
    assert training_quantization(plan, torch.float16) == quantization("float16", "float16", "fp4", double=False)
    stated = plan.model_copy(update={"compute_dtype": Dtype.BFLOAT16})
    assert training_quantization(stated, torch.float32) == quantization("float32", "bfloat16", "fp4", double=False)


def test_eight_bits_are_refused() -> None:
    plan = QuantizationPlan(bits=8, quant_type=QuantType.NF4, double_quant=False, compute_dtype=None, quant_storage=None)
    with pytest.raises(UnsupportedBaseError, match=r"method\.quantization\.bits is 8"):
        training_quantization(plan, torch.bfloat16)

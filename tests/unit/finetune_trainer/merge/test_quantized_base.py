"""A merge can add an adapter to the dequantized weights that its QLoRA training used."""

from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedConfig

from finetune_job.api.enumerations import Dtype
from finetune_job.api.method import QuantStorage, QuantType
from finetune_job.plan.method_plan import QuantizationPlan
from finetune_trainer.merge.changes import Quantization
from finetune_trainer.merge.merge_adapter import MergeOptions, merge_adapter
from finetune_trainer.merge.quantized_base import quantized_parameters, training_quantization
from finetune_trainer.weights.errors import UnsupportedBaseError
from tests.unit.finetune_trainer.merge import tiny


def quantization(load: str = "bfloat16", compute: str = "bfloat16", kind: str = "nf4", *, double: bool = True) -> Quantization:
    return Quantization(kind, double_quant=double, load_dtype=load, compute_dtype=compute)


def llama(*, tied: bool = False) -> PreTrainedConfig:
    """Return a configuration whose rows have a multiple of 64 values; bitsandbytes' layers on a CPU unpack others wrongly."""
    config = tiny.llama(tie_word_embeddings=tied)
    config.update({"hidden_size": 128, "intermediate_size": 640, "head_dim": 32})
    return config


def gpt2() -> PreTrainedConfig:
    config = tiny.gpt2()
    config.update({"n_embd": 128})
    return config


def packed_model(base: Path, double: bool = True) -> torch.nn.Module:
    """Load a base as the trainer does."""
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
    """Save a copy of the base with the weights by which the layers of the packed model multiply."""
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
        (
            llama(tied=True),
            {"r": 8, "use_dora": True, "target_modules": ["v_proj", "up_proj"], "modules_to_save": ["model.norm"]},
        ),
        (gpt2(), {"r": 8, "fan_in_fan_out": True, "target_modules": ["c_attn", "c_proj"]}),
        (gpt2(), {"r": 8, "use_dora": True, "fan_in_fan_out": True, "target_modules": ["c_attn", "c_proj"]}),
    ],
    ids=["llama", "tied llama with DoRA", "gpt2", "gpt2 with DoRA"],
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
        quantized = quantized_parameters(AutoModelForCausalLM.from_config(config))
    packed = {f"{name}.weight" for name, module in packed_model(base).named_modules() if isinstance(module, Linear4bit)}
    assert set(quantized) == packed
    assert "lm_head.weight" not in quantized
    assert set(quantized.values()) == {config.model_type == "gpt2"}


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

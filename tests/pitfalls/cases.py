"""One fine-tuning step on a tiny Llama with the real libraries: settings in, loss and what became of the weights out."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HIDDEN = 64
LAYERS = 2
VOCABULARY = 64


@dataclass(frozen=True)
class Case:
    """The settings that the pitfalls are about, in the libraries' own meaning."""

    version: int = 1
    dora: bool = False
    bits: int | None = None
    storage: str | None = None
    compute: str | None = None
    dtype: str = "float32"
    policy: str = "peft"
    """peft, transformer, size or none."""
    use_orig_params: bool = False
    autocast: bool = True
    param_dtype: str | None = None
    compute_autocast: str | None = None
    """Element type of torch.autocast around the forward pass."""
    bias: str = "none"
    attention_bias: bool = False
    attach_after_wrapping: bool = False
    wrap_classes: tuple[str, ...] | None = None
    min_num_params: int = 1000


def save_base(directory: Path, *, attention_bias: bool = False) -> Path:
    """A tiny Llama with random weights as safetensors."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
        attention_bias=attention_bias,
    )
    place = directory / f"base-{attention_bias}"
    LlamaForCausalLM(config).save_pretrained(place)
    return place


def load_base(case: Case, base: Path) -> Any:
    """The base as the case wants it held, in training mode."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    options: dict[str, Any] = {}
    if case.bits == 8:
        options = {"quantization_config": BitsAndBytesConfig(load_in_8bit=True), "device_map": {"": "cpu"}}
    elif case.bits == 4:
        quantization: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
        if case.storage is not None:
            quantization["bnb_4bit_quant_storage"] = getattr(torch, case.storage)
        quantization["bnb_4bit_compute_dtype"] = getattr(torch, case.compute or case.dtype)
        options = {"quantization_config": BitsAndBytesConfig(**quantization), "device_map": {"": "cpu"}}
    model = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, case.dtype), **options)
    model.train()
    return model


def adapted(case: Case, model: Any) -> Any:
    """The model with a fresh adapter; B starts off zero, so that one step shows whether A learns too."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear", use_dora=case.dora, bias=case.bias)
    return get_peft_model(model, config, autocast_adapter_dtype=case.autocast)


def sharded(case: Case, model: Any) -> Any:
    """The model under the case's FSDP version and wrap policy."""
    import torch
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    param_dtype = getattr(torch, case.param_dtype) if case.param_dtype else None
    if case.version == 2:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        mixed = MixedPrecisionPolicy(param_dtype=param_dtype)
        for module in [*(module for module in model.modules() if isinstance(module, LlamaDecoderLayer)), model]:
            fully_shard(module, mesh=mesh, mp_policy=mixed)
        return model
    from peft.utils.other import fsdp_auto_wrap_policy
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    policies: dict[str, Any] = {
        "peft": lambda: fsdp_auto_wrap_policy(model),
        "transformer": lambda: functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}),
        "size": lambda: functools.partial(size_based_auto_wrap_policy, min_num_params=case.min_num_params),
        "none": lambda: None,
    }
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=policies[case.policy](),
        use_orig_params=case.use_orig_params,
        mixed_precision=MixedPrecision(param_dtype=param_dtype) if param_dtype else None,
        device_id=torch.device("cpu"),
    )


def prepared(case: Case, base: Path) -> Any:
    """Base, adapter, sharding, in the case's order."""
    model = load_base(case, base)
    if case.attach_after_wrapping:
        return adapted(case, sharded(case, model))
    return sharded(case, adapted(case, model))


def train(rank: int, case: Case, base: str) -> dict[str, Any]:
    """Two optimizer steps; `losses` on this rank's batch, and how many trainable values moved."""
    import torch

    model = prepared(case, Path(base))
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    tokens = torch.arange(32).reshape(2, 16) * (rank + 3) % VOCABULARY
    losses = []
    for _ in range(3):
        with torch.autocast("cpu", dtype=getattr(torch, case.compute_autocast or "bfloat16"), enabled=bool(case.compute_autocast)):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, "units": units(model)}


def units(model: Any) -> int:
    """Number of FSDP units."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return sum(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules())

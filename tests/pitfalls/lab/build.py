"""Base, adapter and sharding of a case, as the libraries make them."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.pitfalls.lab.case import Case
from tests.pitfalls.lab.models import LAYER_CLASSES, saved_model

ADAPTERS: dict[str, Mapping[str, Any]] = {
    "LORA": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "ADALORA": {"init_r": 4, "target_r": 2, "total_step": 20, "tinit": 2, "tfinal": 10, "target_modules": "all-linear"},
    "PROMPT_TUNING": {"num_virtual_tokens": 4},
    "P_TUNING": {"num_virtual_tokens": 4},
    "PREFIX_TUNING": {"num_virtual_tokens": 4},
}
"""Settings of a method where the case gives none."""


def load_base(case: Case) -> Any:
    """The base as the case wants it held."""
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
    place = saved_model(case.model, case.config)
    model = AutoModelForCausalLM.from_pretrained(place, dtype=getattr(torch, case.dtype), **options)
    if case.unpacked:
        _unpack(model)
    if case.kbit_preparation:
        from peft import prepare_model_for_kbit_training

        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if case.train_mode:
        model.train()
    return model


def _unpack(model: Any) -> None:
    """Put an ordinary layer with the values of the packed weights in the place of each 4-bit layer."""
    import torch
    from bitsandbytes.nn import Linear4bit

    for name, module in list(model.named_modules()):
        if isinstance(module, Linear4bit):
            plain = torch.nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            plain.weight = torch.nn.Parameter(unpacked(module.weight), requires_grad=False)
            plain.bias = module.bias
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, plain.to(module.compute_dtype))


def unpacked(weight: Any) -> Any:
    """Values of a packed weight: two to a byte, the first in the high half, each times the largest value of its block."""
    import torch

    state = weight.quant_state
    packed = weight.data.contiguous().view(torch.uint8).flatten()
    numbers = torch.stack([packed >> 4, packed & 15], dim=1).flatten().long()
    largest = state.absmax
    if state.nested:
        inner = state.state2
        scales = inner.absmax.repeat_interleave(inner.blocksize)[: largest.numel()]
        largest = inner.code[largest.long()] * scales + state.offset
    values = state.code[numbers] * largest.repeat_interleave(state.blocksize)[: numbers.numel()]
    return values[: state.shape.numel()].view(state.shape).to(state.dtype)


def adapter_config(case: Case) -> Any:
    """PEFT's configuration."""
    from peft import get_peft_config

    assert case.method is not None
    settings = {**ADAPTERS.get(case.method, {}), **case.adapter}
    return get_peft_config({"peft_type": case.method, "task_type": "CAUSAL_LM", **settings})


def adapted(case: Case, model: Any) -> Any:
    """The model with a fresh adapter, none of whose parameters is zero, so that one step shows whether each of them learns."""
    import torch
    from peft import get_peft_model

    if case.method is None:
        return model
    torch.manual_seed(1)
    model = get_peft_model(model, adapter_config(case), autocast_adapter_dtype=case.autocast)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and not parameter.is_meta and not bool(parameter.any()):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def with_checkpointing(case: Case, model: Any) -> Any:
    """Activation checkpointing as Trainer turns it on: on the model that it was given, adapter and all."""
    if case.checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": case.checkpointing == "reentrant"})
    return model


def layers(case: Case, model: Any) -> list[Any]:
    """The transformer layers of the model."""
    return [module for module in model.modules() if type(module).__name__ == LAYER_CLASSES[case.model]]


def sharded(case: Case, model: Any) -> Any:
    """The model under the case's wrapper."""
    import torch

    if case.version is None:
        return model
    if case.version == 0:
        return torch.nn.parallel.DistributedDataParallel(model)
    param_dtype = getattr(torch, case.param_dtype) if case.param_dtype else None
    if case.version == 2:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        mixed = MixedPrecisionPolicy(param_dtype=param_dtype)
        for module in [*layers(case, model), model]:
            fully_shard(module, mesh=mesh, mp_policy=mixed)
        return model
    from peft.utils.other import fsdp_auto_wrap_policy
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    policies: dict[str, Any] = {
        "peft": lambda: fsdp_auto_wrap_policy(model),
        "transformer": lambda: functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={type(layer) for layer in layers(case, model)}
        ),
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


def inner(case: Case, model: Any) -> Any:
    """The model inside its wrapper."""
    return model.module if case.version in (0, 1) else model


def peft_model_from(case: Case, adapter: Path) -> Any:
    """A fresh base with a saved adapter, for inference."""
    from peft import PeftModel

    model = load_base(case)
    return PeftModel.from_pretrained(model, str(adapter)).eval()

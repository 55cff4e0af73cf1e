"""Models, settings and batches whose memory is both predicted and measured: by tests, and by bench/memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftModel
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from finetune_job.api.inputs import Attention
from finetune_job.plan.element_types import resolve_elements
from finetune_job.plan.run_plan import RunPlan
from finetune_memory.adapters import trained_parameters
from finetune_memory.estimate import Estimate, estimate
from finetune_memory.families import base_parameters
from finetune_memory.model_shape import ModelShape, Workload, facts_of
from finetune_trainer.data.batches import Batch
from finetune_trainer.model import variable_length
from finetune_trainer.model.activation_checkpointing import checkpoint_activations
from finetune_trainer.model.adapters import attach
from finetune_trainer.model.dtypes import resolve_dtypes
from finetune_trainer.model.fused_adapters import fuse_adapters
from finetune_trainer.model.load import attention_of
from finetune_trainer.objective.next_token import NextToken
from tests.support.memory_tracking import StorageTracker
from tests.support.tiny_model import fused, plan_of, tiny_spec

SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "head_dim": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 96,
    "first_k_dense_replace": 1,
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 128,
    "n_layer": 4,
    "n_head": 8,
    "vocab_size": 1024,
    "n_positions": 1024,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def config_of(kind: str, **changes: Any) -> dict[str, Any]:
    """Settings of a small model of a family."""
    if kind == "gpt2":
        return {**GPT2, **changes}
    extra = {
        "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96},
        "deepseek_v3": LATENT,
    }.get(kind, {})
    return {"model_type": kind, **SMALL, **extra, **changes}


@dataclass(frozen=True)
class MemoryCase:
    """A model, a job and a batch."""

    name: str
    config: Mapping[str, Any]
    spec: dict[str, dict[str, Any]] = field(default_factory=dict)
    stored: str = "bfloat16"
    rows: int = 2
    length: int = 256
    is_packed: bool = False
    is_fused: bool = False

    @property
    def plan(self) -> RunPlan:
        """The job's plan, for one rank."""
        training = {"microBatchSize": self.rows, "globalBatchSize": self.rows, "maxSteps": 1, **self.spec.get("training", {})}
        changes = {"parallelism": {"processesPerNode": 1}, **self.spec, "training": training}
        return fused(plan_of(tiny_spec(**changes))) if self.is_fused else plan_of(tiny_spec(**changes))


def predicted(case: MemoryCase, device: torch.device) -> Estimate:
    """From the configuration alone."""
    plan = case.plan
    elements = resolve_elements(plan, case.stored)
    base = base_parameters(case.config, elements.load)
    parameters = trained_parameters(base, plan.method, elements.load, case.config["model_type"])
    shape = ModelShape(parameters, (), facts_of(case.config))
    has_mask = case.is_packed and plan.model.attention is not Attention.VARLEN
    work = Workload(case.rows, case.length, has_mask=has_mask, on_gpu=device.type == "cuda")
    return estimate(plan, shape, elements, work)


def built(case: MemoryCase, device: torch.device) -> torch.nn.Module:
    """The real model as the trainer trains it on one rank."""
    plan = case.plan
    settings = {name: value for name, value in case.config.items() if name != "model_type"}
    torch.manual_seed(0)
    config = CONFIG_MAPPING[case.config["model_type"]](**settings)
    dtype = resolve_dtypes(plan, getattr(torch, case.stored)).load
    with device:
        base = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention_of(plan, config))
    base.config.use_cache = False
    model: torch.nn.Module = attach(base, plan) if plan.method.trains_adapter else base
    if case.is_fused and isinstance(model, PeftModel):
        fuse_adapters(model, ())
    checkpoint_activations(base, plan.training.activation_checkpointing)
    if plan.model.attention is Attention.VARLEN:
        variable_length.install(base)
    NextToken().install(model)
    model.to(device).train()
    return model


def batch_of(case: MemoryCase) -> Batch:
    """Random tokens, all supervised but the first of each document; packed: two documents in each row."""
    torch.manual_seed(1)
    shape = (case.rows, case.length)
    ids = torch.randint(3, case.config["vocab_size"], shape)
    positions = torch.arange(case.length).expand(shape).clone()
    if case.is_packed:
        positions[:, case.length // 2 :] -= case.length // 2
    return Batch(ids, ids.clone(), positions, ids.numel(), (case.length,) * case.rows)


def measured_peak(case: MemoryCase) -> int:
    """Bytes beside the model's own at the fullest moment of a forward and backward pass on the CPU."""
    model, plan, device = built(case, torch.device("cpu")), case.plan, torch.device("cpu")
    dtypes = resolve_dtypes(plan, getattr(torch, case.stored))
    batch = batch_of(case)
    tracker = StorageTracker([*model.parameters(), *model.buffers()])
    with tracker:
        loss = NextToken().weighted_loss(model, batch, 1.0, device, dtypes.param)
        torch.autograd.backward(loss)
    return tracker.peak


def predicted_peak(case: MemoryCase) -> int:
    """The same from the configuration alone."""
    state = {"frozen weights", "trained weights", "optimizer state", "constants", "process", "checkpoint snapshot"}
    return sum(term.bytes for term in predicted(case, torch.device("cpu")).terms if term.name not in state)


def _lora(**settings: Any) -> dict[str, dict[str, Any]]:
    return {"method": {"type": "LoRA", "lora": {"r": 8, **settings}}}


def _cases() -> list[MemoryCase]:
    lora, full = _lora(), {"method": {"type": "Full", "lora": None}}
    eager, bf16 = {"model": {"attention": "eager"}}, {"training": {"precision": "bf16"}}
    dora = {"method": {"type": "DoRA", "lora": {"r": 8}}}
    recomputed = {kind: {"training": {"activationCheckpointing": kind}} for kind in ("Selective", "Full")}
    llama, many = config_of("llama"), config_of("qwen3_moe", num_experts=64)
    return [
        MemoryCase("llama, LoRA", llama, lora),
        MemoryCase("llama, LoRA in float32", llama, lora, stored="float32"),
        MemoryCase("llama, LoRA, precision bf16", llama, {**lora, **bf16}),
        MemoryCase("llama, LoRA, fused", llama, lora, is_fused=True),
        MemoryCase("llama, LoRA, fused, precision bf16", llama, {**lora, **bf16}, is_fused=True),
        MemoryCase("llama, LoRA, fused, Selective", llama, {**lora, **recomputed["Selective"]}, is_fused=True),
        MemoryCase("llama, LoRA with dropout, fused", llama, _lora(loraDropout="0.1"), is_fused=True),
        MemoryCase("llama, LoRA, packed", llama, lora, is_packed=True),
        MemoryCase("llama, LoRA, packed, 512 tokens", llama, lora, length=512, is_packed=True),
        MemoryCase("llama, LoRA, 512 tokens", llama, lora, length=512),
        MemoryCase("llama, LoRA, 8 x 64 tokens", llama, lora, rows=8, length=64),
        MemoryCase("llama, LoRA, eager", llama, {**lora, **eager}),
        MemoryCase("llama, LoRA with dropout", llama, _lora(loraDropout="0.1")),
        MemoryCase("llama, LoRA on queries and values", llama, _lora(targetModules=["q_proj", "v_proj"])),
        MemoryCase("llama, LoRA, Selective", llama, {**lora, **recomputed["Selective"]}),
        MemoryCase("llama, LoRA, recomputed", llama, {**lora, **recomputed["Full"]}),
        MemoryCase("llama, DoRA", llama, dora),
        MemoryCase("llama, DoRA with dropout", llama, {"method": {"type": "DoRA", "lora": {"r": 8, "loraDropout": "0.1"}}}),
        MemoryCase("llama, DoRA, Selective", llama, {**dora, **recomputed["Selective"]}),
        MemoryCase("llama, Full in float32", llama, full, stored="float32"),
        MemoryCase("llama, Full", llama, full),
        MemoryCase("llama, Full, recomputed", llama, {**full, **recomputed["Full"]}),
        MemoryCase("qwen3, LoRA", config_of("qwen3"), lora),
        MemoryCase("qwen3, Full, Selective", config_of("qwen3"), {**full, **recomputed["Selective"]}, stored="float32"),
        MemoryCase("gemma2, LoRA, eager for want of SDPA", config_of("gemma2"), lora),
        MemoryCase("gemma3, LoRA", config_of("gemma3_text"), lora),
        MemoryCase("gpt2, LoRA", config_of("gpt2"), lora),
        MemoryCase("gpt2, Full", config_of("gpt2"), full, stored="float32"),
        MemoryCase("gpt2, LoRA, dropout of attention", config_of("gpt2", attn_pdrop=0.1, resid_pdrop=0.1), lora),
        MemoryCase("phi3, LoRA", config_of("phi3"), lora),
        MemoryCase("phi3, LoRA, packed", config_of("phi3"), lora, is_packed=True),
        MemoryCase("gpt-neox, LoRA", config_of("gpt_neox"), lora),
        MemoryCase("starcoder2, LoRA", config_of("starcoder2"), lora),
        MemoryCase("olmo2, LoRA", config_of("olmo2"), lora),
        MemoryCase("mixtral, LoRA on attention", config_of("mixtral"), _lora(targetModules=["q_proj", "v_proj"])),
        MemoryCase("mixtral, LoRA", config_of("mixtral"), lora),
        MemoryCase("mixtral, LoRA in float32", config_of("mixtral"), lora, stored="float32"),
        MemoryCase("qwen3-moe, LoRA", config_of("qwen3_moe"), lora),
        MemoryCase("qwen3-moe, LoRA, precision bf16", config_of("qwen3_moe"), {**lora, **bf16}),
        MemoryCase("qwen3-moe, LoRA, recomputed", config_of("qwen3_moe"), {**lora, **recomputed["Full"]}),
        MemoryCase("qwen3-moe, LoRA, experts larger than activations", many, lora, rows=1, length=64),
        MemoryCase("qwen3-moe, LoRA, experts recomputed", many, {**lora, **recomputed["Full"]}, rows=1, length=64),
        MemoryCase("mixtral, Full", config_of("mixtral"), full, stored="float32"),
        MemoryCase("deepseek-v3, LoRA on attention", config_of("deepseek_v3"), _lora(targetModules=["q_b_proj", "o_proj"])),
        MemoryCase("deepseek-v3, Full, recomputed", config_of("deepseek_v3"), {**full, **recomputed["Full"]}, stored="float32"),
    ]


CASES = _cases()

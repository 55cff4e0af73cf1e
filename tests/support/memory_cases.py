"""Models, settings and batches whose memory is both predicted and measured: by tests, and by bench/memory."""

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
from tests.support.cases import table
from tests.support.memory_tracking import StorageTracker
from tests.support.tiny_model import fused, plan_of, tiny_spec

SMALL, LATENT, GPT2 = (table(__file__, name) for name in ("SMALL", "LATENT", "GPT2"))


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
    """Return the estimate from the configuration alone."""
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
    """Return the peak that is estimated from the configuration alone."""
    state = {"frozen weights", "trained weights", "optimizer state", "constants", "process", "checkpoint snapshot"}
    return sum(term.bytes for term in predicted(case, torch.device("cpu")).terms if term.name not in state)


def _case(name: str, row: dict[str, Any]) -> MemoryCase:
    config = config_of(row.pop("kind"), **row.pop("changes", {}))
    return MemoryCase(name, config, **row)


CASES = [_case(name, dict(row)) for name, row in table(__file__, "CASES").items()]

"""Attention by the bounds of documents on a device against float32 with a mask on the CPU: gradients of whole models."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finetune_trainer.data.batches import Batch, PreparedSplit
from finetune_trainer.errors import ConfigError
from finetune_trainer.model import variable_length
from finetune_trainer.objective.next_token import NextToken
from tests.support.tiny_model import prepared_split

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 264, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.1,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen3": SIZES,
    "mixtral": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mistral": SIZES | {"sliding_window": 6},
    "gemma2": SIZES | {"sliding_window": 6, "query_pre_attn_scalar": 16},
    "gpt2": {"vocab_size": 264, "n_embd": 64, "n_layer": 2, "n_head": 4, "attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0},
}
REFUSED = frozenset({"gemma2"})
"""Its scores are capped, which no kernel does: it takes transformers' own attention with a mask."""
FLOAT32_BOUND, BOUND_OF_MASK = 1e-6, 1.5
"""Largest relative distance on the CPU; and on a device in 16 bits, in distances of the same step with a mask."""
SLACK_16_BITS = 1e-3
BOUND_OF_ROUNDING = 0.1
"""Of a mask alone in 16 bits; on an H200 0.01 to 0.08 were measured."""


def kernel_rows(device: torch.device) -> list[dict[str, object]]:
    """One row for each model: distances of the gradients from those of the CPU in float32 with a mask."""
    batch = PreparedSplit.of(prepared_split(8, 1), pad_token_id=256).batch(range(8))
    rows: list[dict[str, object]] = []
    for kind, settings in MODELS.items():
        torch.manual_seed(1)
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)).train()
        loss, wanted = _step(model, batch, CPU)
        on_device = copy.deepcopy(model).to(device, torch.float32 if device.type == "cpu" else torch.bfloat16)
        masked_loss, masked = _step(on_device, batch, device)
        far_masked = _distance(masked, wanted)
        row = {"model": kind, "loss": loss, "with a mask": masked_loss, "distance with a mask": far_masked}
        try:
            with variable_length.installed(on_device):
                bounds_loss, by_bounds = _step(on_device, batch, device)
                again = _step(on_device, batch, device)[1]
        except ConfigError as error:
            bound = FLOAT32_BOUND if device.type == "cpu" else BOUND_OF_ROUNDING
            rows.append({**row, "refused": str(error), "is_within_bound": far_masked <= bound})
            continue
        far = _distance(by_bounds, wanted)
        bound = FLOAT32_BOUND if device.type == "cpu" else BOUND_OF_MASK * far_masked + SLACK_16_BITS
        is_same = torch.equal(by_bounds, again)
        rows.append(
            {**row, "by bounds": bounds_loss, "distance": far, "is_within_bound": far <= bound, "same bits again": is_same}
        )
    return rows


def _step(model: Any, batch: Batch, device: torch.device) -> tuple[float, torch.Tensor]:
    """Loss, and all gradients in one float32 vector on the CPU."""
    objective = NextToken()
    objective.install(model)
    loss = objective.weighted_loss(model, batch, 1 / batch.num_supervised_tokens, device, None)
    torch.autograd.backward(loss)
    found = [parameter.grad.float().cpu().flatten() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return loss.item(), torch.cat(found)


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, in the Euclidean norm."""
    return float((found - wanted).norm() / wanted.norm())

"""Small models of the five architectures to which the fast path is held, and one of them as a rank trains it."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finetune_job.api.inputs import Attention
from finetune_job.api.training import GradientReduction
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.data.batches import PreparedSplit
from finetune_trainer.model import sharded
from finetune_trainer.objective.next_token import NextToken
from finetune_trainer.observe.steps import StepResult
from finetune_trainer.ranks.gang import Gang
from finetune_trainer.train.optimizers import build_optimizer
from finetune_trainer.train.step import StepBatches, StepInputs, optimizer_step
from finetune_trainer.train.virtual_ranks import VirtualRanks
from tests.support.tiny_model import fused, plan_of, prepared_split, tiny_spec, write_tokenizer

CPU = torch.device("cpu")
_SIZES = {
    "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.1,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "qwen3": _SIZES,
    # A window shorter than the longest documents, of 12 tokens, in every second layer.
    "gemma2": _SIZES | {"sliding_window": 6, "query_pre_attn_scalar": 8},
    "mixtral": _SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {
        "vocab_size": 264, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "initializer_range": 0.1, "bos_token_id": 256,
        "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    },
}  # fmt: skip
WITHOUT_VARLEN = ("gemma2",)
"""It caps its attention scores, which no kernel of torch does."""


def write_shape(directory: Path, kind: str, dtype: torch.dtype = torch.float32) -> Path:
    """A model directory of random weights; the same bytes every time."""
    torch.manual_seed(7)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPES[kind], pad_token_id=256, eos_token_id=256))
    model.to(dtype).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def plan_of_shape(
    kind: str, *, is_fast: bool, method: str = "LoRA", ranks: int = 1, dropout: str = "0", **training: Any
) -> RunPlan:
    """LoRA on every linear layer, unless another method is named. is_fast: attention by the bounds of documents and LoRA in the
    type of its base, as a profile with a GPU has them; else a mask and PEFT's own forward pass.
    """
    lora = None if method == "Full" else {"r": 4, "loraAlpha": 6, "loraDropout": dropout}
    spec = tiny_spec(
        method={"type": method, "lora": lora}, training={"microBatchSize": 2, **training}, parallelism={"processesPerNode": ranks}
    )
    plan = plan_of(spec)
    if not is_fast:
        return plan
    return fused(plan if kind in WITHOUT_VARLEN else plan.with_attention(Attention.VARLEN))


class SmallRun:
    """Model, optimizer and data of one rank, which computes all virtual ones if the plan's reduction is ordered."""

    def __init__(self, plan: RunPlan, base: Path, device: torch.device = CPU) -> None:
        """base: from `write_shape`."""
        gang = Gang(0, 1, device.index or 0, device, None)
        objective = NextToken()
        trained = sharded.build(plan, base, gang, objective)
        self.model = trained.module
        torch.manual_seed(5)
        for name, parameter in self.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        split = PreparedSplit.of(prepared_split(16, 1), pad_token_id=256)
        is_ordered = plan.training.reduction is GradientReduction.ORDERED
        virtual = VirtualRanks(plan.parallelism.world_size, gang) if is_ordered else None
        batches = StepBatches(split, plan.training, gang, virtual)
        self.inputs = StepInputs(self.model, objective, batches, plan.training, gang, trained.autocast, trained.reduction)
        self.optimizer = build_optimizer(trained.pieces, plan)

    def step(self, number: int) -> StepResult:
        return optimizer_step(self.inputs, self.optimizer, step=number, learning_rate=1e-3, stop_requested=False)

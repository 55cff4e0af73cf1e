"""One contender in a process of its own: `python -m bench.gpu.contender ours|trl SIZE STEPS`. Prints one JSON line.

The model is made on the device from a configuration: its weights are random, because their values change neither time nor memory.
Each sequence is full: documents of a quarter to all of its length, so that packing has boundaries to keep.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from bench.gpu.plan import ALPHA, RANK, RATE, SEED, plan_of

SIZES: dict[str, dict[str, Any]] = {
    "8B": {
        "model": {
            "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500_000.0,
        },
        "length": 4096, "micro_batch": 2, "accumulation": 2,
    },
    "tiny": {
        "model": {
            "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 256,
        },
        "length": 64, "micro_batch": 2, "accumulation": 2,
    },
}  # fmt: skip
"""The shape of Llama 3 8B, and one that shows on a CPU that the code runs."""
WARM_UP_STEPS = 2


def make_model(size: str, device: torch.device) -> Any:
    """Llama in bfloat16 with a float32 adapter on every linear layer."""
    torch.manual_seed(SEED)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            base = LlamaForCausalLM(LlamaConfig(**SIZES[size]["model"], attn_implementation="sdpa", use_cache=False))
    finally:
        torch.set_default_dtype(before)
    return base


def adapter() -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules="all-linear")


def documents(size: str, steps: int) -> list[list[list[int]]]:
    """Of each sequence its documents, which fill it."""
    length, vocabulary = SIZES[size]["length"], SIZES[size]["model"]["vocab_size"]
    generator = np.random.default_rng(SEED)
    sequences = []
    for _ in range(steps * SIZES[size]["micro_batch"] * SIZES[size]["accumulation"]):
        inner = [] if generator.random() < 0.5 else sorted(generator.choice([1, 2, 3], 2, replace=False) * length // 4)
        sequences.append([generator.integers(1, vocabulary, b - a).tolist() for a, b in pairwise([0, *inner, length])])
    return sequences


def ours(size: str, steps: int, device: torch.device) -> tuple[list[float], float]:
    """The trainer's objective, batches, optimizer step and adapter, without the run's files."""
    from finetune_trainer.checkpoint.state import pieces
    from finetune_trainer.data.batches import PreparedSplit
    from finetune_trainer.data.shards import SplitArrays
    from finetune_trainer.model.dtypes import resolve_casts, resolve_dtypes
    from finetune_trainer.objective.next_token import NextToken
    from finetune_trainer.ranks.gang import Gang
    from finetune_trainer.train.optimizers import build_optimizer
    from finetune_trainer.train.step import StepBatches, optimizer_step

    plan = plan_of(steps, SIZES[size])
    found = documents(size, steps)
    flat = [document for sequence in found for document in sequence]
    tokens = np.concatenate([np.array(document) for document in flat])
    ends = np.cumsum([len(document) for document in flat])
    supervised = np.ones(len(tokens), dtype=bool)
    supervised[[0, *ends[:-1]]] = False
    arrays = SplitArrays(
        tokens=tokens,
        supervised=supervised,
        document_ends=ends,
        sequence_ends=np.cumsum([len(sequence) for sequence in found]),
        supervised_tokens=np.array([sum(len(document) - 1 for document in sequence) for sequence in found]),
    )
    model = get_peft_model(make_model(size, device), adapter()).train()
    objective, gang = NextToken(), Gang(0, 1, 0, device, None)
    objective.install(model)
    optimizer = build_optimizer(pieces(model), plan)
    batches = StepBatches(PreparedSplit.of(arrays, 0), plan.training, gang)
    # As a job computes: the model is held in bfloat16, its adapters in float32.
    autocast = resolve_casts(plan, resolve_dtypes(plan, torch.bfloat16), 1).by_autocast
    starts = []
    for step in range(steps):
        starts.append(time.monotonic())
        result = optimizer_step(
            model, optimizer, objective, batches, plan.training,
            step=step, learning_rate=RATE, gang=gang, autocast=autocast, stop_requested=False,
        )  # fmt: skip
    return [*starts, finished(device)], result.loss


def trl(size: str, steps: int, device: torch.device) -> tuple[list[float], float]:
    """SFTTrainer on the same documents with its best-fit packing."""
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from tests.support.tiny_model import write_tokenizer

    starts: list[float] = []
    losses: list[float] = []

    class Times(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            starts.append(time.monotonic())

        def on_train_end(self, *_: Any, **__: Any) -> None:
            starts.append(finished(device))

        def on_log(self, _arguments: Any, _state: Any, _control: Any, logs: dict[str, float], **__: Any) -> None:
            losses.extend([logs["loss"]] if "loss" in logs else [])

    settings = SIZES[size]
    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer(Path(directory))
        trainer = SFTTrainer(
            model=make_model(size, device),
            args=SFTConfig(
                output_dir=directory, per_device_train_batch_size=settings["micro_batch"],
                gradient_accumulation_steps=settings["accumulation"], max_steps=steps, learning_rate=RATE,
                lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, max_length=settings["length"], packing=True,
                bf16=device.type == "cuda", use_cpu=device.type == "cpu", gradient_checkpointing=False, logging_steps=1,
                save_strategy="no", report_to=[], disable_tqdm=True, seed=SEED,
            ),
            train_dataset=Dataset.from_list([{"input_ids": each} for sequence in documents(size, steps) for each in sequence]),
            processing_class=PreTrainedTokenizerFast.from_pretrained(directory),
            peft_config=adapter(),
            callbacks=[Times()],
        )  # fmt: skip
        trainer.train()
    return starts, losses[-1]


def finished(device: torch.device) -> float:
    """The time when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.monotonic()


def main() -> None:
    name, size, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    device = torch.device("cuda" if torch.cuda.is_available() and size != "tiny" else "cpu")
    starts, loss = {"ours": ours, "trl": trl}[name](size, steps, device)
    settings = SIZES[size]
    tokens = (steps - WARM_UP_STEPS) * settings["micro_batch"] * settings["accumulation"] * settings["length"]
    figures = {
        "tokens_per_second": tokens / (starts[-1] - starts[WARM_UP_STEPS]),
        "loss": loss,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)

"""One rank of a contender in a process of its own: `python -m bench.gpu.contender NAME DIRECTORY SIZE STEPS RANK RANKS`.

`prepare` as the contender writes what all find there: a model with random weights, whose values change neither time nor memory,
and prepared data. Each sequence is full: documents of a quarter to all of its length, so that packing has boundaries to keep.
Ours is a rank of a job as a pod runs it: it loads, shards, observes, saves and exports. Both write figures to the directory.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM

from bench.gpu.faults import TracedAlone
from bench.gpu.plan import ALPHA, RANK, RATE, SEED, spec_of
from bench.trainer.contender import trained_as_a_job
from bench.trainer.workload import write_choice
from finetune_job.api.profile import GpuResource
from finetune_trainer.context import RunContext
from finetune_trainer.data.shard_writer import write_prepared
from finetune_trainer.data.shards import TRAIN, SplitArrays
from tests.support.tiny_model import GPU_PROFILE, run_context, write_tokenizer

_MODELS: dict[str, dict[str, Any]] = {
    "8B": {
        "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rope_theta": 500_000.0,
    },
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256,
    },
}  # fmt: skip
_SHORT: dict[str, Any] = {"micro_batch": 2, "accumulation": 2, "steps": 10, "warm_up": 2}
_LONG: dict[str, Any] = {"micro_batch": 1, "accumulation": 1, "warm_up": 1, "recomputes": True}
SIZES: dict[str, dict[str, Any]] = {
    "8B": {"model": _MODELS["8B"], "length": 4096, **_SHORT},
    "8B-32k": {"model": _MODELS["8B"], "length": 32_768, "steps": 4, **_LONG},
    "8B-128k": {"model": _MODELS["8B"], "length": 131_072, "steps": 2, **_LONG},
    "tiny": {"model": _MODELS["tiny"], "length": 64, **_SHORT},
    "tiny-long": {"model": _MODELS["tiny"], "length": 256, "steps": 3, **_LONG},
}
"""The shape of Llama 3 8B with rows of some lengths, and one that shows on a CPU that the code runs.

steps: optimizer steps, unless others are asked for; warm_up: how many of them do not count. By calculation one of 131,072 tokens
takes an H200 a minute. recomputes: whether layers are computed again in the backward pass, without which a long row does not
fit."""
MODEL = "models/tiny"
"""Where the plan looks for it."""


def make_model(size: str, device: torch.device) -> Any:
    """Llama in bfloat16."""
    torch.manual_seed(SEED)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            return LlamaForCausalLM(LlamaConfig(**SIZES[size]["model"], attn_implementation="sdpa", use_cache=False))
    finally:
        torch.set_default_dtype(before)


def adapter() -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules="all-linear")


def documents(size: str, steps: int, ranks: int) -> list[list[list[int]]]:
    """Of each sequence its documents, which fill it."""
    length, vocabulary = SIZES[size]["length"], SIZES[size]["model"]["vocab_size"]
    generator = np.random.default_rng(SEED)
    sequences = []
    for _ in range(steps * ranks * SIZES[size]["micro_batch"] * SIZES[size]["accumulation"]):
        inner = [] if generator.random() < 0.5 else sorted(generator.choice([1, 2, 3], 2, replace=False) * length // 4)
        sequences.append([generator.integers(1, vocabulary, b - a).tolist() for a, b in pairwise([0, *inner, length])])
    return sequences


def manifest_of(size: str, steps: int, ranks: int, **training: Any) -> dict[str, Any]:
    training |= {"activationCheckpointing": "Full"} if recomputes(size) else {}
    return spec_of(steps, SIZES[size], ranks, **training)


def context_of(directory: Path, size: str, steps: int, ranks: int, **training: Any) -> RunContext:
    return run_context(directory, manifest_of(size, steps, ranks, **training), profile=GPU_PROFILE)


def prepare(directory: Path, size: str, steps: int, ranks: int, device: torch.device) -> None:
    """What fetch and preflight leave; a model that is there stays. device: where weights are drawn, which is slow on a CPU."""
    if not (directory / MODEL / "config.json").exists():
        make_model(size, device).save_pretrained(directory / MODEL, max_shard_size="4GB")
        write_tokenizer(directory / MODEL)
    context, found = context_of(directory, size, steps, ranks), documents(size, steps, ranks)
    flat = [document for sequence in found for document in sequence]
    ends = np.cumsum([len(document) for document in flat])
    supervised = np.ones(ends[-1], dtype=bool)
    supervised[[0, *ends[:-1]]] = False
    arrays = SplitArrays(
        tokens=np.concatenate([np.array(document) for document in flat]),
        supervised=supervised,
        document_ends=ends,
        sequence_ends=np.cumsum([len(sequence) for sequence in found]),
        supervised_tokens=np.array([sum(len(document) - 1 for document in sequence) for sequence in found]),
    )
    write_prepared(context.workspace.prepared, {TRAIN: arrays}, {"pad_token_id": 0, "splits": [TRAIN]})
    write_choice(context, gpu=None if device.type == "cpu" else GpuResource())


def ours(directory: Path, size: str, steps: int, rank: int, ranks: int, **training: Any) -> tuple[list[float], list[float]]:
    """The times at which steps begin and the last one ends, and the losses."""
    figures = trained_as_a_job(context_of(directory, size, steps, ranks, **training), directory, rank, ranks)
    return figures["starts"], figures["losses"]


def trl(directory: Path, size: str, steps: int, rank: int, ranks: int) -> tuple[list[float], list[float]]:
    """SFTTrainer on the same documents with its best-fit packing."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    if ranks > 1:
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=(directory / "port").read_text(),
        )  # fmt: skip
    on_gpu = torch.cuda.is_available()
    starts: list[float] = []
    losses: list[float] = []

    class Times(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            starts.append(time.monotonic())

        def on_train_end(self, *_: Any, **__: Any) -> None:
            starts.append(finished())

        def on_log(self, _arguments: Any, _state: Any, _control: Any, logs: dict[str, float], **__: Any) -> None:
            losses.extend([logs["loss"]] if "loss" in logs else [])

    settings = SIZES[size]
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(directory / MODEL, dtype=torch.bfloat16, attn_implementation="sdpa"),
        args=SFTConfig(
            output_dir=str(directory / "trl"), per_device_train_batch_size=settings["micro_batch"],
            gradient_accumulation_steps=settings["accumulation"], max_steps=steps, learning_rate=RATE,
            lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, max_length=settings["length"], packing=True,
            bf16=on_gpu, use_cpu=not on_gpu, gradient_checkpointing=recomputes(size), logging_steps=1, save_strategy="no",
            report_to=[], disable_tqdm=True, seed=SEED, ddp_backend=("nccl" if on_gpu else "gloo") if ranks > 1 else None,
        ),
        train_dataset=Dataset.from_list(
            [{"input_ids": each} for sequence in documents(size, steps, ranks) for each in sequence]
        ),
        processing_class=AutoTokenizer.from_pretrained(directory / MODEL),
        peft_config=adapter(),
        callbacks=[Times()],
    )  # fmt: skip
    trainer.train()
    return starts, losses


def recomputes(size: str) -> bool:
    return bool(SIZES[size].get("recomputes"))


OURS: dict[str, dict[str, Any]] = {"ours": {}, "compiled": {"compile": True}, "deterministic": {"deterministic": True}}
"""Fields of `spec.training`."""
CONTENDERS: dict[str, Callable[..., tuple[list[float], list[float]]]] = {
    **{name: partial(ours, **training) for name, training in OURS.items()},
    "trl": trl,
}


def finished() -> float:
    """The time when the device has done all that it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic()


def main() -> None:
    name, place, size, steps, rank, ranks = sys.argv[1:]
    directory, arguments = Path(place), (size, int(steps), int(rank), int(ranks))
    on_gpu = torch.cuda.is_available()
    if name == "prepare":
        prepare(directory, size, int(steps), int(ranks), torch.device("cuda" if on_gpu else "cpu"))
        return
    if not on_gpu:
        TracedAlone().arm(int(rank))
    starts, losses = CONTENDERS[name](directory, *arguments)
    figures = {
        "starts": starts,
        "loss": losses[-1],
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
    }
    (directory / f"figures-{rank}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # As the trainer's ranks do: threads of collective libraries must not hold up the end.
    os._exit(0)

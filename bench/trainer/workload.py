"""The work that all contenders do: a Llama with random weights, documents that can be learnt, and one plan."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finetune_job.api.job import RunSpec
from finetune_job.api.profile import FineTuneProfileSpec, GpuResource
from finetune_job.plan.resolve import placement_of
from finetune_memory.describe import model_shape, read_model
from finetune_memory.verdict import judge_memory, limit_of
from finetune_trainer.context import RunContext
from finetune_trainer.data.batches import PreparedData
from finetune_trainer.data.packing import pack
from finetune_trainer.data.shard_writer import write_prepared
from finetune_trainer.data.shards import TRAIN, SplitArrays
from finetune_trainer.train.batches import global_batch, micro_batch
from tests.support.tiny_model import run_context, tiny_spec, write_model_report, write_tiny_llama


@dataclass(frozen=True)
class Size:
    """Of the model and its batches."""

    model: dict[str, Any]
    length: int
    micro_batch: int
    """Sequences per rank and pass."""

    @property
    def global_batch(self) -> int:
        """Sequences of a step."""
        return 4 * self.micro_batch


MODEL: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 1024,
}  # fmt: skip
"""26 million parameters: enough that computing, not the loop, takes the time."""
LENGTH = 512
TOY_MODEL: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
TOY = Size(TOY_MODEL, length=64, micro_batch=1)
"""Shows that everything runs, and nothing of its speed."""
PAD = 256
RANK, ALPHA, RATE, SEED = 16, 32, 1e-2, 11
WARM_UP_STEPS = 2
"""Not counted: first allocations, thread pools, first files."""


def plan_spec(method: str, steps: int, world_size: int, size: Size, reduction: str = "Fast") -> dict[str, Any]:
    """What our contenders are told; the others read the same numbers."""
    adapter = {"r": RANK, "loraAlpha": ALPHA, "loraDropout": "0"}
    return tiny_spec(
        data={"validation": None, "maxSequenceLength": size.length},
        method={"type": method, "lora": adapter if method == "LoRA" else None},
        training={
            "maxSteps": steps, "globalBatchSize": size.global_batch, "microBatchSize": size.micro_batch,
            "learningRate": str(RATE), "scheduler": "Constant", "warmupRatio": "0", "weightDecay": "0", "maxGradNorm": "1.0",
            "seed": SEED, "reduction": reduction,
        },
        # Sharding is left open, as in most jobs, and chosen as for those.
        parallelism={"processesPerNode": world_size},
        checkpoint={"everySteps": 1_000_000},
    )  # fmt: skip


def documents(steps: int, size: Size) -> tuple[list[tuple[list[int], list[bool]]], list[list[int]]]:
    """Ids and supervised flags of each document, and the sequences as lists of documents: exactly `steps` global batches.

    A token is followed by a fixed other one four times of five, so that there is something to learn. The first quarter of a
    document is a prompt.
    """
    generator = random.Random(SEED)
    following = list(range(size.model["vocab_size"]))
    generator.shuffle(following)
    found: list[tuple[list[int], list[bool]]] = []
    for _ in range(steps * size.global_batch * 4):
        length = min(size.length, 40 + int(generator.expovariate(1 / 140)))
        ids = [generator.randrange(64)]
        while len(ids) < length:
            ids.append(following[ids[-1]] if generator.random() < 0.8 else generator.randrange(64))
        found.append((ids, [place >= max(length // 4, 1) for place in range(length)]))
    packed, ends = pack([len(ids) for ids, _ in found], size.length)
    sequences = [part.tolist() for part in np.split(packed, ends)[: steps * size.global_batch]]
    return found, sequences


def write(directory: Path, method: str, steps: int, world_size: int, size: Size) -> RunContext:
    """Model, prepared data, documents and their size under `directory`."""
    (directory / "size.json").write_text(json.dumps(asdict(size)))
    model = directory / "models" / "tiny"
    if not model.exists():
        write_tiny_llama(model, **size.model)
    context = run_context(directory, plan_spec(method, steps, world_size, size))
    found, sequences = documents(steps, size)
    order = [document for sequence in sequences for document in sequence]
    supervised = [np.array(found[document][1]) for document in order]
    arrays = SplitArrays(
        tokens=np.concatenate([np.array(found[document][0]) for document in order]),
        supervised=np.concatenate(supervised),
        document_ends=np.cumsum([len(flags) for flags in supervised]),
        sequence_ends=np.cumsum([len(sequence) for sequence in sequences]),
        supervised_tokens=np.array([sum(sum(found[document][1]) for document in sequence) for sequence in sequences]),
    )
    write_prepared(context.workspace.prepared, {TRAIN: arrays}, {"pad_token_id": PAD, "splits": [TRAIN]})
    write_choice(context)
    lines = (
        {"input_ids": ids, "labels": [token if flag else -100 for token, flag in zip(ids, flags, strict=True)]}
        for ids, flags in (found[document] for document in order)
    )
    (directory / "documents.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    write_batches(context, directory, steps, world_size, size)
    data = PreparedData.open(context.workspace.prepared).train
    lengths = [sum(len(found[document][0]) for document in sequence) for sequence in sequences]
    of_steps = [global_batch(step, size.global_batch, SEED, len(sequences)) for step in range(steps)]
    counts = [[sum(lengths[number] for number in step), data.supervised_tokens(step)] for step in of_steps]
    (directory / "counts.json").write_text(json.dumps(counts))
    return context


def size_in(directory: Path) -> Size:
    """What `write` was given."""
    return Size(**json.loads((directory / "size.json").read_text()))


def write_choice(context: RunContext, gpu: GpuResource | None = None) -> None:
    """What preflight leaves for training: its choice by the memory of a rank, in a pod of a profile that sets nothing else."""
    placement = placement_of("default", FineTuneProfileSpec(trainer_image="trainer", gpu=gpu), RunSpec())
    plan = context.plan.model_copy(update={"placement": placement})
    files = read_model(context.base_model)
    chosen = judge_memory(plan, model_shape(plan, files), files.stored, limit_of(plan)).resharding
    if chosen is not None:
        write_model_report(context, reshard_after_forward=chosen.value)


def write_batches(context: RunContext, directory: Path, steps: int, world_size: int, size: Size) -> None:
    """The tensors of each step, micro-step and rank, for the bare loop, which has no code of ours."""
    data, training = PreparedData.open(context.workspace.prepared).train, context.plan.training

    def of_rank(rank: int) -> Iterator[list[dict[str, torch.Tensor]]]:
        for step in range(steps):
            sequences = global_batch(step, size.global_batch, SEED, data.num_sequences)
            places = [
                micro_batch(sequences, micro_step, rank, world_size, size.micro_batch)
                for micro_step in range(training.gradient_accumulation_steps)
            ]
            yield [
                {"input_ids": batch.input_ids, "labels": batch.labels, "position_ids": batch.position_ids}
                for batch in map(data.batch, places)
            ]

    for rank in range(world_size):
        torch.save(list(of_rank(rank)), directory / f"batches-{rank}.pt")

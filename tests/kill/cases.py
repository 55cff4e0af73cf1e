"""What is trained while it is killed: small runs that between them use every kind of state and of sharding."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from finetune_trainer.context import RunContext
from finetune_trainer.data.shard_writer import write_prepared
from finetune_trainer.data.shards import TRAIN, VALIDATION
from tests.support.tiny_model import VOCABULARY, plan_of, prepared_split, run_context, tiny_spec

TOTAL_STEPS = 8
_FSDP1 = {"parallelism": {"processesPerNode": 2, "fsdp": {"version": 1}}}
_FEW = {"targetModules": ["q_proj", "v_proj"]}
"""Each adapter's matrices are units of their own in FSDP 1, whose messages take most of a small run's time."""
_FULL = {"method": {"type": "Full", "lora": None}}
_EVALUATED = {"evaluation": {"everySteps": 3}}
_KNOWN = 257
"""Tokens of the tiny model."""
_TOKENS = [{"content": f"<|{number}|>", "special": True, "stop": number == 0} for number in range(VOCABULARY + 3 - _KNOWN)]
"""More than it has rows to spare."""
_ADDED = {"model": {"addedTokens": _TOKENS}}


@dataclass(frozen=True)
class Case:
    """A run of two ranks with packing, two micro-steps per step and a checkpoint every second step."""

    name: str
    changes: Mapping[str, Any]
    dtype: torch.dtype = torch.float32
    sizes: tuple[int, ...] = ()
    """Of which each attempt has a number of ranks of its own; empty: all as many as the plan says."""

    @property
    def saves_asynchronously(self) -> bool:
        """Whether a checkpoint is written while the next steps are computed; full fine-tuning does, unless it is told not to."""
        is_full = self.changes.get("method", {}).get("type") == "Full"
        return is_full and self.changes.get("checkpoint", {}).get("asynchronous", True)

    @property
    def adds_tokens(self) -> bool:
        """Whether preflight writes the base that is trained."""
        return "addedTokens" in self.changes.get("model", {})

    def context(self, claims: Path) -> RunContext:
        """Claims with model, prepared data and plan."""
        training = {"maxSteps": TOTAL_STEPS, **self.changes.get("training", {})}
        spec = tiny_spec(**{**self.changes, "training": training})
        if self.adds_tokens:
            # They are what a run reads that has them; other data is written only where there is none.
            _write_with_tokens(RunContext(plan_of(spec), "", claims, 0).workspace.prepared)
        return run_context(claims, spec, dtype=self.dtype)


def _write_with_tokens(directory: Path) -> None:
    """Prepared data in which some of the bytes are added tokens."""
    if directory.exists():
        return
    splits = {TRAIN: prepared_split(12, 1), VALIDATION: prepared_split(4, 2)}
    for name, split in splits.items():
        tokens = np.where(split.tokens % 32 < len(_TOKENS), _KNOWN + split.tokens % 32, split.tokens)
        splits[name] = dataclasses.replace(split, tokens=tokens)
    write_prepared(directory, splits, {"pad_token_id": _KNOWN - 1, "splits": sorted(splits)})


CASES = (
    Case("LoRA, FSDP2", {"method": {"type": "LoRA", "lora": {"r": 4}}}),
    Case("LoRA with dropout, FSDP1", {"method": {"type": "LoRA", "lora": {"r": 4, "loraDropout": "0.1", **_FEW}}, **_FSDP1}),
    Case("DoRA, FSDP1", {"method": {"type": "DoRA", "lora": {"r": 4, **_FEW}}, **_FSDP1}),
    Case("DoRA, FSDP2, evaluated", {"method": {"type": "DoRA", "lora": {"r": 4}}, **_EVALUATED}),
    Case("QLoRA, FSDP2, evaluated", {"method": {"type": "QLoRA", "lora": {"r": 4}}, **_EVALUATED}, torch.bfloat16),
    Case("Full, FSDP2, sync", {**_FULL, "checkpoint": {"everySteps": 2, "asynchronous": False}}),
    Case(
        "Full, FSDP2, async, best",
        {**_FULL, "training": {"learningRate": "1e-3"}, "evaluation": {"everySteps": 3, "loadBestModelAtEnd": True}},
    ),
    Case("Full, FSDP1, async", {**_FULL, **_FSDP1}),
    Case("LoRA, added tokens, FSDP2", {"method": {"type": "LoRA", "lora": {"r": 4, **_FEW}}, **_ADDED}),
    Case("Full, added tokens, FSDP1", {**_FULL, **_FSDP1, **_ADDED, "checkpoint": {"everySteps": 2, "asynchronous": False}}),
)


_SIZES = (1, 2, 3, 4, 8)
_ORDERED = {
    "training": {"globalBatchSize": 16, "reduction": "Ordered"},
    "parallelism": {"processesPerNode": max(_SIZES), "fsdp": {"version": 2}},
}


def _elastic(method: str) -> dict[str, Any]:
    return {"method": {"type": method, "lora": {"r": 4, "loraDropout": "0.1"}}, **_ORDERED, **_EVALUATED}


ELASTIC_CASES = (
    Case("LoRA, elastic, float32", _elastic("LoRA"), sizes=_SIZES),
    Case("LoRA, elastic, bfloat16", _elastic("LoRA"), torch.bfloat16, _SIZES),
    Case("DoRA, elastic, float32", _elastic("DoRA"), sizes=_SIZES),
    Case("QLoRA, elastic, bfloat16", _elastic("QLoRA"), torch.bfloat16, _SIZES),
)


def elastic_order(seed: int) -> tuple[Case, ...]:
    """Those that change their number of ranks, in an order of this seed's own."""
    return tuple(Random(f"elastic cases of {seed}").sample(ELASTIC_CASES, len(ELASTIC_CASES)))


def drawn_order(seed: int) -> tuple[Case, ...]:
    """All cases in an order of this seed's own, whose second one saves asynchronously.

    A few runs are the first few of it, and which methods they kill changes with the seed; but what is written while training goes
    on is always among them, and not as the first run, whose ranks a torchrun starts and which is hit by the second.
    """
    random = Random(f"cases of {seed}")
    order = random.sample(CASES, len(CASES))
    second = random.choice([case for case in order if case.saves_asynchronously])
    order.remove(second)
    return order[0], second, *order[1:]

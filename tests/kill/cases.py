"""What is trained while it is killed: small runs that between them use every kind of state and of sharding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from finetune_trainer.context import RunContext
from tests.support.tiny_model import run_context, tiny_spec

TOTAL_STEPS = 8
_FSDP1 = {"parallelism": {"processesPerNode": 2, "fsdp": {"version": 1}}}
_FULL = {"method": {"type": "Full", "lora": None}}
_EVALUATED = {"evaluation": {"everySteps": 3}}


@dataclass(frozen=True)
class Case:
    """A run of two ranks with packing, two micro-steps per step and a checkpoint every second step."""

    name: str
    changes: Mapping[str, Any]
    dtype: torch.dtype = torch.float32

    def context(self, claims: Path) -> RunContext:
        """Claims with model, prepared data and plan."""
        training = {"maxSteps": TOTAL_STEPS, **self.changes.get("training", {})}
        return run_context(claims, tiny_spec(**{**self.changes, "training": training}), dtype=self.dtype)


CASES = (
    Case("LoRA, FSDP2", {"method": {"type": "LoRA", "lora": {"r": 4}}}),
    Case("LoRA with dropout, FSDP1", {"method": {"type": "LoRA", "lora": {"r": 4, "loraDropout": "0.1"}}, **_FSDP1}),
    Case("DoRA, FSDP1", {"method": {"type": "DoRA", "lora": {"r": 4}}, **_FSDP1}),
    Case("DoRA, FSDP2, evaluated", {"method": {"type": "DoRA", "lora": {"r": 4}}, **_EVALUATED}),
    Case("QLoRA, FSDP2, evaluated", {"method": {"type": "QLoRA", "lora": {"r": 4}}, **_EVALUATED}, torch.bfloat16),
    Case("Full, FSDP2, sync", {**_FULL, "checkpoint": {"everySteps": 2, "asynchronous": False}}),
    Case(
        "Full, FSDP2, async, best",
        {
            **_FULL,
            "training": {"learningRate": "1e-3"},
            "evaluation": {"everySteps": 3, "loadBestModelAtEnd": True},
        },
    ),
    Case("Full, FSDP1, async", {**_FULL, **_FSDP1}),
)

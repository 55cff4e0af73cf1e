"""What every contender trains with, and the plan of ours."""

from __future__ import annotations

from typing import Any

from finetune_job.plan.run_plan import RunPlan
from tests.support import tiny_model

RANK, ALPHA, RATE, SEED = 16, 32, 1e-4, 5


def plan_of(steps: int, settings: dict[str, Any]) -> RunPlan:
    """One process, one GPU."""
    return tiny_model.plan_of(
        tiny_model.tiny_spec(
            data={"maxSequenceLength": settings["length"], "validation": None},
            method={"type": "LoRA", "lora": {"r": RANK, "loraAlpha": ALPHA, "loraDropout": "0"}},
            training={
                "maxSteps": steps, "globalBatchSize": settings["micro_batch"] * settings["accumulation"],
                "microBatchSize": settings["micro_batch"], "learningRate": str(RATE), "seed": SEED, "precision": "bf16",
            },
            parallelism={"processesPerNode": 1},
        )
    )  # fmt: skip

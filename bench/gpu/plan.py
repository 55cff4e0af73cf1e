"""What every contender trains with, and the manifest of ours."""

from __future__ import annotations

from typing import Any

from tests.support.tiny_model import tiny_spec

RANK, ALPHA, RATE, SEED = 16, 32, 1e-4, 5


def spec_of(steps: int, settings: dict[str, Any], ranks: int, **training: Any) -> dict[str, Any]:
    """One pod with a GPU for each rank; what is not said here is left open, as in most jobs."""
    return tiny_spec(
        # What preflight chooses on a GPU, where a profile names one.
        model={"attention": "varlen"},
        data={"maxSequenceLength": settings["length"], "validation": None},
        method={"type": "LoRA", "lora": {"r": RANK, "loraAlpha": ALPHA, "loraDropout": "0"}},
        training={
            "maxSteps": steps, "globalBatchSize": settings["micro_batch"] * settings["accumulation"] * ranks,
            "microBatchSize": settings["micro_batch"], "learningRate": str(RATE), "scheduler": "Constant", "warmupRatio": "0",
            "weightDecay": "0", "seed": SEED, "precision": "bf16", **training,
        },
        parallelism={"processesPerNode": ranks},
        checkpoint={"everySteps": 100},
    )  # fmt: skip

"""Which trainable parameter learns at which multiple of the run's learning rate."""

from __future__ import annotations

from finetune_job.plan.run_plan import MethodPlan


def learning_rate_scale(name: str, method: MethodPlan) -> float:
    """Factor on the learning rate of the parameter called `name`: LoRA+'s ratio for `lora_B`, 1 for everything else.

    Hayou, Ghosh and Yu, 2024, LoRA+: efficient low rank adaptation of large models: B, which starts at zero, is to learn faster
    than A. Adapters on embeddings, where it is A that starts at zero, keep the run's rate.
    """
    ratio = None if method.lora is None else method.lora.lora_plus_ratio
    return ratio if ratio is not None and "lora_B" in name.split(".") else 1.0

"""What rank 0 answers at /progress, what the operator copies into status and what the local mode draws."""

from pydantic import BaseModel, ConfigDict

from finetune_job.failures import Count


class Progress(BaseModel):
    """State of a training run after its latest optimizer step."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)
    attempt: Count
    step: Count
    total_steps: Count
    epoch: float = 0.0
    loss: float | None = None
    """Mean over the supervised tokens of the latest step."""
    eval_loss: float | None = None
    """Mean over the supervised held-out tokens, latest evaluation."""
    initial_eval_loss: float | None = None
    """The same before the first step."""
    learning_rate: float | None = None
    gradient_norm: float | None = None
    """Of all trainable parameters before clipping, latest step."""
    tokens_per_second: float | None = None
    tokens_per_second_per_device: float | None = None
    calculated_tokens_per_second: float | None = None
    """What the planner calculates for the device that rank 0 has; None where it does not know the device or the model."""
    mfu: float | None = None
    """Model FLOPs utilisation, 0 to 1; None where the peak of the device is not known."""
    reached_flops_ratio: float | None = None
    """The same of what the device of rank 0 reached in a matrix product before training; None where it was not tested."""
    step_seconds_median: float | None = None
    step_seconds_p95: float | None = None
    data_wait_ratio: float | None = None
    """Share of the step time spent waiting for batches, 0 to 1."""
    straggler_ratio: float | None = None
    """Slowest rank's computing time over the median rank's, latest step."""
    slowest_device_ratio: float | None = None
    """Products per second of the slowest rank's device over the median rank's, before training; None where none was tested."""
    peak_memory_bytes: Count | None = None
    """Largest over all ranks: of the device, or resident memory on the CPU."""
    goodput: float | None = None
    """Share of the time since the first attempt began that went into steps that count, 0 to 1."""
    best_eval_loss: float | None = None
    seconds_left: float | None = None
    """At the pace of the latest steps."""
    checkpoint_step: Count | None = None
    """Step of the latest complete checkpoint."""
    checkpoint_interval_seconds: float | None = None
    """Between checkpoints as the plan asks for them, at the pace of the latest steps; None without checkpoints."""
    checkpoint_time: float | None = None
    """Seconds since the epoch when it was seen to be complete, or this attempt began from it; without any, when it began."""

    def facts(self) -> dict[str, str]:
        """As facts of the training pod's last report, which nobody has to poll for; they read back to the same values."""
        return {name: str(value) for name, value in self.model_dump(exclude_none=True, exclude={"attempt"}).items()}

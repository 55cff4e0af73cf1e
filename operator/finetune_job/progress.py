"""The progress of training: rank 0 serves it at /progress, the operator copies it into status, and a local run displays it."""

from pydantic import BaseModel, ConfigDict, Field

from finetune_job.failures import Count, RankRestart


class Progress(BaseModel):
    """The state of a training run after its latest optimizer step."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)
    attempt: Count
    step: Count
    total_steps: Count
    epoch: float = 0.0
    loss: float | None = None
    """Mean loss over the supervised tokens of the latest step."""
    eval_loss: float | None = None
    """Mean loss over the supervised held-out tokens in the latest evaluation."""
    initial_eval_loss: float | None = None
    """Held-out loss before the first step."""
    learning_rate: float | None = None
    gradient_norm: float | None = None
    """Norm of the gradient of all trainable parameters before clipping, in the latest step."""
    tokens_per_second: float | None = None
    tokens_per_second_per_device: float | None = None
    calculated_tokens_per_second: float | None = None
    """Tokens per second that the planner predicts for rank 0's device; None if it does not know the device or the model."""
    mfu: float | None = None
    """Model FLOPs utilisation, 0 to 1; None if the peak rate of the device is unknown."""
    reached_flops_ratio: float | None = None
    """Model FLOPs per second as a share of the rate that rank 0's device reached in a matrix product test; None if untested."""
    step_seconds_median: float | None = None
    step_seconds_p95: float | None = None
    data_wait_ratio: float | None = None
    """Share of the step time spent waiting for batches, 0 to 1."""
    straggler_ratio: float | None = None
    """The slowest rank's computing time divided by the median rank's, in the latest step."""
    slowest_device_ratio: float | None = None
    """Matrix product speed of the slowest device divided by the median, tested before training; None if no device was tested."""
    peak_memory_bytes: Count | None = None
    """Peak memory of the rank with the largest peak: device memory or, on the CPU, resident memory."""
    goodput: float | None = None
    """Share of the time since the first attempt began that was spent on steps whose results were kept, 0 to 1."""
    best_eval_loss: float | None = None
    seconds_left: float | None = None
    """Estimated seconds until the end, at the pace of the latest steps."""
    checkpoint_step: Count | None = None
    """Step of the latest complete checkpoint."""
    checkpoint_interval_seconds: float | None = None
    """Seconds between planned checkpoints, at the pace of the latest steps; None without checkpoints."""
    checkpoint_time: float | None = None
    """Unix time when the newest checkpoint was completed or the attempt resumed from it; else when the attempt began."""

    restarts: list[RankRestart] = Field(default_factory=list)
    """Restarts of the ranks within their pod during this attempt."""

    def facts(self) -> dict[str, str]:
        """Return the progress as facts for the training pod's last report, from which the same values can be read back."""
        return {name: str(value) for name, value in self.model_dump(exclude_none=True, exclude={"attempt", "restarts"}).items()}

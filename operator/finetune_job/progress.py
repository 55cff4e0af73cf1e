"""What rank 0 answers at /progress, what the operator copies into status and what the local mode draws."""

from pydantic import BaseModel, ConfigDict


class Progress(BaseModel):
    """State of a training run after its latest optimizer step."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    attempt: int
    step: int
    total_steps: int
    epoch: float = 0.0
    loss: float | None = None
    """Mean over the supervised tokens of the latest step."""
    eval_loss: float | None = None
    """Mean over the supervised held-out tokens, latest evaluation."""
    initial_eval_loss: float | None = None
    """The same before the first step."""
    learning_rate: float | None = None
    tokens_per_second: float | None = None
    checkpoint_step: int | None = None
    """Step of the latest complete checkpoint."""

    def facts(self) -> dict[str, str]:
        """As facts of the training pod's last report, which nobody has to poll for; they read back to the same values."""
        return {name: str(value) for name, value in self.model_dump(exclude_none=True, exclude={"attempt"}).items()}

"""What a case came to."""

from dataclasses import dataclass, field

from tests.pitfalls.lab.case import Stage


@dataclass(frozen=True)
class Observation:
    """Plain data; what belongs to a stage that was not reached is empty or None."""

    failed_in: Stage | None = None
    """Stage of the first exception on any rank; None: there was none."""
    error: str = ""
    """Type and message of that exception."""
    trace: str = ""
    units: dict[str, str] = field(default_factory=dict)
    """Module name -> class name of each FSDP unit; "" is the root."""
    trained: tuple[str, ...] = ()
    """Parameters that require gradients, by their names before sharding."""
    losses: tuple[tuple[float, ...], ...] = ()
    """Per rank: the loss of each step."""
    gradient_error: float | None = None
    """Largest difference from the gradients of one process with the same global batch, relative to their largest value, over all
    trained parameters; infinite where a gradient is not finite."""
    without_gradient: tuple[str, ...] = ()
    """Trained parameters that got no gradient, or zeros, where one process has one."""
    saved: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Tensor name -> shape in the saved adapter file."""
    save_missing: tuple[str, ...] = ()
    """Tensors that one process saves and this run did not, or with another shape."""
    save_extra: tuple[str, ...] = ()
    save_error: float | None = None
    """Largest difference of a saved value from the value that was trained."""
    resume_error: float | None = None
    """Largest difference of a trained value between a run that was interrupted and one that was not."""
    merge_error: float | None = None
    """Largest difference of a logit between merged model and base with adapter."""
    merge_effect: float | None = None
    """Largest difference that the adapter makes to a logit of the base."""

    @property
    def failed(self) -> bool:
        """Whether any rank raised."""
        return self.failed_in is not None

    @property
    def learns(self) -> bool:
        """Whether the loss fell on every rank."""
        return bool(self.losses) and all(losses[-1] < losses[0] - 0.02 for losses in self.losses)

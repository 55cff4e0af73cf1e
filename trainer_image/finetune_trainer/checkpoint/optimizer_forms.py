"""PURE. Which state each optimizer keeps for a parameter. Without torch, because preflight counts bytes with it."""

from __future__ import annotations

from dataclasses import dataclass

from finetune_job.api.training import OptimizerName


@dataclass(frozen=True)
class StateForm:
    """The state of one parameter, by torch's own names."""

    tensors: tuple[str, ...]
    """Kinds with one value per element; all start at zero."""
    is_counted: bool
    """Whether there is a `step`, too, one number per parameter."""


_MOMENTS = StateForm(("exp_avg", "exp_avg_sq"), is_counted=True)
FORMS: dict[OptimizerName, StateForm] = {
    OptimizerName.ADAMW: _MOMENTS,
    OptimizerName.RADAM: _MOMENTS,
    # A zero buffer gives the same first step as none: momentum times zero plus the gradient.
    OptimizerName.SGD: StateForm(("momentum_buffer",), is_counted=False),
}

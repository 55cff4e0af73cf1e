"""The state that each optimizer keeps for a parameter, by torch's own names."""

from __future__ import annotations

from dataclasses import dataclass

from finetune_job.api.training import OptimizerName
from finetune_job.plan.run_plan import TrainingPlan

STEP_BYTES = 4
"""One float32 for each parameter whose steps are counted."""


@dataclass(frozen=True)
class StateForm:
    """The form of the state that is kept for one parameter."""

    tensors: tuple[str, ...]
    """Names of the tensors with one value per element; all start at zero."""
    is_counted: bool
    """Whether the state also has `step`, one number per parameter."""


_MOMENTS = StateForm(("exp_avg", "exp_avg_sq"), is_counted=True)
FORMS: dict[OptimizerName, StateForm] = {
    OptimizerName.ADAMW: _MOMENTS,
    OptimizerName.RADAM: _MOMENTS,
    # torch begins without a buffer, but one of zeros gives the same first step: momentum times zero plus the gradient.
    OptimizerName.SGD: StateForm(("momentum_buffer",), is_counted=False),
}


def state_form(training: TrainingPlan) -> StateForm:
    """Return the form of the state that the plan's optimizer keeps."""
    if training.optimizer is OptimizerName.SGD and not training.momentum:
        return StateForm((), is_counted=False)
    return FORMS[training.optimizer]


def state_bytes(training: TrainingPlan, own_bytes: int, tensors: int) -> int:
    """Count the bytes of one rank's state. own_bytes, tensors: size and number of its parameters; the state has their type."""
    form = state_form(training)
    return len(form.tensors) * own_bytes + (tensors * STEP_BYTES if form.is_counted else 0)

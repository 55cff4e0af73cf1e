"""Which state each optimizer keeps for a parameter, by torch's own names."""

from __future__ import annotations

from dataclasses import dataclass

from finetune_job.api.training import OptimizerName
from finetune_job.plan.run_plan import TrainingPlan

STEP_BYTES = 4
"""One float32 for each parameter whose steps are counted."""


@dataclass(frozen=True)
class StateForm:
    """The state of one parameter."""

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


def state_form(training: TrainingPlan) -> StateForm:
    """What the plan's optimizer keeps."""
    if training.optimizer is OptimizerName.SGD and not training.momentum:
        return StateForm((), is_counted=False)
    return FORMS[training.optimizer]


def state_bytes(training: TrainingPlan, own_bytes: int, tensors: int) -> int:
    """State of the parameters of one rank: `own_bytes` of them in `tensors` parameters, in their own element type."""
    form = state_form(training)
    return len(form.tensors) * own_bytes + (tensors * STEP_BYTES if form.is_counted else 0)

"""What tests expect of a case."""

from tests.pitfalls.lab.case import Case, Stage
from tests.pitfalls.lab.observation import Observation
from tests.pitfalls.lab.observe import observe

GRADIENT_ERRORS = {"float32": 1e-4, "bfloat16": 0.06, "float16": 0.02}
"""How far gradients may be from those of one process, by the coarsest element type in use."""


def fails(case: Case, stage: Stage, *texts: str) -> Observation:
    """Assert that a case ends in this stage with an exception that holds all of these texts."""
    found = observe(case)
    assert found.failed_in == stage, f"{case} failed in {found.failed_in}: {found.trace}"
    assert all(text in found.error for text in texts), found.error
    return found


def trains(case: Case) -> Observation:
    """Assert that a case trains right: the gradients of one process, none missing, and the loss falls on every rank."""
    found = observe(case)
    assert not found.failed, found.trace
    assert found.without_gradient == ()
    coarsest = max(
        GRADIENT_ERRORS[dtype] for dtype in (case.dtype, case.param_dtype, case.compute, case.compute_autocast) if dtype
    )
    assert found.gradient_error is not None
    assert found.gradient_error <= coarsest
    assert found.learns, found.losses
    return found

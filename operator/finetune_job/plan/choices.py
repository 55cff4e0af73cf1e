"""What a manifest leaves open: each value that is chosen for it, or left to preflight, is recorded with the reason.

`resolve` makes one `Choices` for a plan and hands it to inputs.py, resolve_model.py and resolve_training.py; what it collects
becomes `RunPlan.choices`, which status, `finetune validate` and the report of a run show.
"""

from typing import TypeVar

from finetune_job.plan.run_plan import Choice

T = TypeVar("T")


class Choices:
    """Collects what was left open."""

    def __init__(self) -> None:
        self.made: list[Choice] = []

    def pick(self, field: str, given: T | None, otherwise: T, reason: str) -> T:
        if given is not None:
            return given
        self.made.append(Choice(field=f"spec.{field}", value=otherwise, reason=reason))
        return otherwise

    def leave(self, field: str, given: T | None, otherwise: T, reason: str) -> T:
        """Leave a value to preflight. otherwise: what is taken if nobody can choose, as by a trainer of an earlier release."""
        if given is not None:
            return given
        self.made.append(Choice(field=field, value=None, reason=reason))
        return otherwise

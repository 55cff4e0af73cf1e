"""Records each value that the manifest leaves unset and that the plan or preflight chooses, with the reason.

`resolve` creates one `Choices` per plan and passes it to inputs.py, resolve_model.py and resolve_training.py. The collected
choices become `RunPlan.choices`, which status, `finetune validate` and the report of a run show.
"""

from typing import TypeVar

from finetune_job.plan.run_plan import Choice

T = TypeVar("T")


class Choices:
    """Collects the values chosen for fields that the manifest leaves unset."""

    def __init__(self) -> None:
        self.made: list[Choice] = []

    def pick(self, field: str, given: T | None, otherwise: T, reason: str) -> T:
        if given is not None:
            return given
        self.made.append(Choice(field=f"spec.{field}", value=otherwise, reason=reason))
        return otherwise

    def leave(self, field: str, given: T | None, otherwise: T, reason: str) -> T:
        """Leave a value to preflight. otherwise: the fallback if preflight does not choose, as in earlier releases."""
        if given is not None:
            return given
        self.made.append(Choice(field=field, value=None, reason=reason))
        return otherwise

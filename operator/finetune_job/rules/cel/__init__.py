"""What the API server refuses at once: conditions over the object alone, as CEL in the schema, under the ids of the rule book.

Every condition is true for each object that its rule lets pass; the rule may refuse more, because it sees the whole plan and the
profile. Numbers with a fraction are read as doubles in both, and their bounds are written once, in the ranges of the rules.
Conditions stay cheap: the API server counts the cost of the longest lists and texts that the schema allows.
"""

from __future__ import annotations

from finetune_job.rules.cel.condition import CelCondition
from finetune_job.rules.cel.inputs_and_results import INPUT_CONDITIONS, RESULT_CONDITIONS
from finetune_job.rules.cel.method_and_training import METHOD_CONDITIONS, RUN_CONDITIONS
from finetune_job.rules.rule import Rule

CONDITIONS: tuple[CelCondition, ...] = (*INPUT_CONDITIONS, *METHOD_CONDITIONS, *RUN_CONDITIONS, *RESULT_CONDITIONS)


def conditions_of(rule: Rule) -> tuple[CelCondition, ...]:
    """The conditions by which the API server refuses some of what the rule refuses."""
    return tuple(condition for condition in CONDITIONS if condition.rule == rule.id)

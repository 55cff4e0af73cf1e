"""Conditions by which the API server itself rejects an object: CEL rules in the schema, with ids from the rule book.

A condition is true for every object that its rule accepts; the rule may refuse more, because it sees the whole plan and the
profile. Rules and conditions both parse fractional numbers as doubles and have the same bounds. Conditions must be cheap: the API
server estimates their cost for the longest lists and strings that the schema allows.
"""

from __future__ import annotations

from finetune_job.rules.book import Rule
from finetune_job.rules.cel.condition import CelCondition
from finetune_job.rules.cel.inputs_and_results import INPUT_CONDITIONS, RESULT_CONDITIONS
from finetune_job.rules.cel.method_and_training import METHOD_CONDITIONS, RUN_CONDITIONS

CONDITIONS: tuple[CelCondition, ...] = (*INPUT_CONDITIONS, *METHOD_CONDITIONS, *RUN_CONDITIONS, *RESULT_CONDITIONS)


def conditions_of(rule: Rule) -> tuple[CelCondition, ...]:
    """Return the conditions by which the API server rejects at least some of what the rule refuses."""
    return tuple(condition for condition in CONDITIONS if condition.rule == rule.id)

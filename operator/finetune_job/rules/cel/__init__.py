"""Conditions by which the API server itself refuses an object: CEL in the schema, with the ids of the rule book.

A condition is true for each object that its rule accepts; the rule may refuse more, because it sees the whole plan and the
profile. Both read numbers with a fraction as doubles, and take their bounds from the ranges of the rules. Conditions must be
cheap: the API server computes their cost for the longest lists and strings that the schema allows.
"""

from __future__ import annotations

from finetune_job.rules.book import Rule
from finetune_job.rules.cel.condition import CelCondition
from finetune_job.rules.cel.inputs_and_results import INPUT_CONDITIONS, RESULT_CONDITIONS
from finetune_job.rules.cel.method_and_training import METHOD_CONDITIONS, RUN_CONDITIONS

CONDITIONS: tuple[CelCondition, ...] = (*INPUT_CONDITIONS, *METHOD_CONDITIONS, *RUN_CONDITIONS, *RESULT_CONDITIONS)


def conditions_of(rule: Rule) -> tuple[CelCondition, ...]:
    """Return the conditions by which the API server refuses some of what the rule refuses."""
    return tuple(condition for condition in CONDITIONS if condition.rule == rule.id)

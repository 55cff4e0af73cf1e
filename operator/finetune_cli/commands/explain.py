"""`finetune explain`: one rule, or the list of all."""

from __future__ import annotations

import difflib

from finetune_job.rules.book import RULES, rule_by_id
from finetune_job.rules.rule import Rule


def explain(identifier: str) -> Rule | list[str]:
    """The rule, or the ids that come closest to what was asked for."""
    rule = rule_by_id(identifier)
    return rule if rule is not None else difflib.get_close_matches(identifier, [each.id for each in RULES], n=3, cutoff=0.3)

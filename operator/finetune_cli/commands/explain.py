"""`finetune explain`: what an id stands for."""

from __future__ import annotations

import difflib

from finetune_job.rules.book import RULES, rule_by_id
from finetune_job.rules.cel import TRANSITIONS, Transition
from finetune_job.rules.rule import Rule


def explain(identifier: str) -> Rule | Transition | list[str]:
    """What has that id, or the ids that come closest to it."""
    identifier = identifier.strip().lower().replace("_", "-").replace(" ", "-")
    rule = rule_by_id(identifier) or next((each for each in TRANSITIONS if each.rule == identifier), None)
    if rule is not None:
        return rule
    known = [*(each.id for each in RULES), *(each.rule for each in TRANSITIONS)]
    return difflib.get_close_matches(identifier, known, n=3, cutoff=0.6)

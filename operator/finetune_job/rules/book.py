"""The rule book: every rule, and the one function that asks them all."""

from __future__ import annotations

from finetune_job.finding import Finding
from finetune_job.rules import (
    data,
    dtypes,
    elastic,
    evaluation,
    experts,
    launch,
    merging,
    method_configuration,
    optimizer,
    outputs,
    quantization,
    sources,
    tokens,
    versions,
    workspace,
    wrapping,
)
from finetune_job.rules.rule import Rule, RuleContext

RULES: tuple[Rule, ...] = (
    *wrapping.RULES,
    *dtypes.RULES,
    *quantization.RULES,
    *method_configuration.RULES,
    *experts.RULES,
    *tokens.RULES,
    *data.RULES,
    *optimizer.RULES,
    *launch.RULES,
    *elastic.RULES,
    *versions.RULES,
    *merging.RULES,
    *evaluation.RULES,
    *outputs.RULES,
    *workspace.RULES,
    *sources.RULES,
)
_BY_ID = {rule.id: rule for rule in RULES}
if len(_BY_ID) != len(RULES):
    raise ValueError("two rules have the same id")


def evaluate(context: RuleContext) -> tuple[Finding, ...]:
    """Every finding, errors first, otherwise in the order of the book."""
    found = [finding for rule in RULES if (finding := rule.check(context)) is not None]
    return tuple(sorted(found, key=lambda finding: finding.severity != "error"))


def rule_by_id(identifier: str) -> Rule | None:
    """The rule of that id, if there is one."""
    return _BY_ID.get(identifier)

"""The rule book: every rule, and the one function that asks them all."""

from __future__ import annotations

from finetune_job.rules import (
    adapters,
    checkpoints,
    compilation,
    data,
    dora,
    dtypes,
    evaluation,
    experts,
    fsdp_versions,
    merging,
    method_settings,
    methods,
    optimization,
    outputs,
    parallelism,
    quantization,
    remote_code,
    sources,
    tokens,
    trainable,
    training,
    workspace,
    wrapping,
)
from finetune_job.rules.context import RuleContext
from finetune_job.rules.rule import Finding, Rule

RULES: tuple[Rule, ...] = (
    *wrapping.RULES,
    *trainable.RULES,
    *dora.RULES,
    *quantization.RULES,
    *dtypes.RULES,
    *checkpoints.RULES,
    *fsdp_versions.RULES,
    *parallelism.RULES,
    *methods.RULES,
    *method_settings.RULES,
    *compilation.RULES,
    *adapters.RULES,
    *tokens.RULES,
    *experts.RULES,
    *data.RULES,
    *training.RULES,
    *optimization.RULES,
    *evaluation.RULES,
    *merging.RULES,
    *outputs.RULES,
    *workspace.RULES,
    *remote_code.RULES,
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

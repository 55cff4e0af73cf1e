"""Manifests for the rule tests: a plain one that no rule speaks against, and changes of it."""

import copy
from collections.abc import Iterable
from typing import Any

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.finding import FieldChange, Finding
from finetune_job.rules.book import evaluate
from finetune_job.rules.rule import RuleContext, with_changes

JOB_NAME = "tuned"
PLAIN: dict[str, Any] = {
    "model": {"source": "pvc://models/base"},
    "data": {"source": "pvc://data/train.jsonl"},
    "training": {"maxSteps": 10},
    "output": {"destination": "pvc://out/result"},
    "workspace": {"claimName": "workspace"},
}


def manifest(changes: dict[str, Any]) -> dict[str, Any]:
    """The plain spec with values by path, such as {"training.epochs": 3}; None removes."""
    return applied(copy.deepcopy(PLAIN), [FieldChange(field=f"spec.{path}", value=value) for path, value in changes.items()])


def applied(spec: dict[str, Any], changes: Iterable[FieldChange]) -> dict[str, Any]:
    """A copy of `spec` with the changes of a finding made, as a program would make them."""
    return with_changes({"spec": spec}, changes)["spec"]


def judged(spec: dict[str, Any], profile: FineTuneProfileSpec | None = None) -> tuple[Finding, ...]:
    return evaluate(RuleContext(FineTuneJobSpec.model_validate(spec), profile, JOB_NAME))

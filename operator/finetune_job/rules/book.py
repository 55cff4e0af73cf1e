"""The rule book: every rule, and the one function that evaluates all of them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from finetune_job.finding import FieldChange, Finding, Severity
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
from finetune_job.rules.rule import CHECKS, Check, Problem, RuleContext, format_value
from finetune_job.rules.rule_tables import NoEffect, Range

_TOPICS = (
    *(wrapping, dtypes, quantization, method_configuration, experts, tokens, data, optimizer, launch, elastic, versions),
    *(merging, evaluation, outputs, workspace, sources),
)
"""The module or package of each topic; its rows are in the TOML file of the same name."""


class Rule(BaseModel, frozen=True, extra="forbid"):
    """A documented pitfall: its row in the rule book, and the function that detects it."""

    id: str
    topic: str
    """The module or package that contains the rule: `wrapping`, `quantization` and so on."""
    check: Check | None
    """The function that detects the pitfall; None for a range, which the row defines completely."""
    title: str
    severity: Severity = "error"
    paths: tuple[str, ...] = Field(alias="reads")
    """Fields under `spec` that the check reads."""
    sources: tuple[str, ...] = ("this product's API",)
    """Documents that describe the pitfall."""
    holds_for: str = "this trainer, every version"
    """Affected library versions, in words for the catalogue; the default is for rules that follow from how this product works."""
    test: str = ""
    """The test that shows the failure with the real libraries: path of the module, `::` and the name of the test."""
    observed: str = ""
    """The exception that the test observes, or the damage if there is no exception."""
    not_reproduced: str = ""
    """Why no test shows the failure with the real libraries; either this or `test` and `observed` are set."""
    applies_to: Literal["ours", "accelerate", "Trainer"] = "ours"
    """The software that fails. Rules refuse jobs only for failures of `ours` (this product); the others are for information."""
    needs_human: bool = False
    """Whether only a person can decide on the fix, because it gives up something that works. Programs ask before applying it."""
    in_preflight: str = ""
    """Problems that only preflight can find, which it reports under the same id; empty if this check finds all problems."""
    message: str = ""
    """The message, if it is the same for every job; otherwise the check writes it."""
    fix: str = ""
    """The remedy, if it is the same for every job."""
    changes: dict[str, Any] = {}
    """New values by path under `spec`, if they are the same for every job. If empty, the first field that the rule reads is
    removed."""
    range: Range | None = None
    no_effect: NoEffect | None = None

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if (self.check is None) != (self.range is not None):
            raise ValueError(f"{self.id}: a rule has either a function with its id, or a range")
        if bool(self.test) == bool(self.not_reproduced) or bool(self.test) != bool(self.observed):
            raise ValueError(f"{self.id}: a row has either test and observed, or not_reproduced")
        return self

    @property
    def reads(self) -> tuple[str, ...]:
        """Fields of the object that the check reads, such as `spec.training.epochs`."""
        return tuple(f"spec.{path}" for path in self.paths)

    @property
    def evidence(self) -> Literal["reproduced", "source"]:
        """The evidence for the rule.

        `reproduced`: tests/pitfalls shows the failure with the real libraries. `source`: known from their source or this
        product's API.
        """
        return "reproduced" if self.test else "source"

    def find(self, context: RuleContext) -> Finding | None:
        """Return the rule's finding for this job; None if the job has no such problem."""
        problem: Problem | bool | None
        if self.check is None:
            problem = self.range.problem(context.spec, self.paths) if self.range is not None else None
        else:
            problem = self.check(context)
            if self.no_effect is not None:
                problem = self.no_effect.problem(context.spec) if problem else None
        return self.finding(problem) if isinstance(problem, Problem) else None

    def finding(self, problem: Problem) -> Finding:
        """Create the finding for a problem."""
        field = problem.field or self.paths[0]
        changes = problem.changes if problem.changes is not None else self.changes or {field: None}
        basis = f"reproduced by {self.test}" if self.test else "source"
        return Finding(
            rule=self.id,
            severity=self.severity,
            field=f"spec.{field}",
            value=format_value(problem.value),
            message=problem.message or self.message,
            fix=problem.fix or self.fix,
            source=f"{basis}: {'; '.join(self.sources)}",
            changes=tuple(
                FieldChange(field=f"spec.{path}", value=str(value) if isinstance(value, StrEnum) else value)
                for path, value in changes.items()
            ),
        )


def read_rules() -> Iterator[Rule]:
    """Yield the rules in the order of topics and rows. Raises ValueError if rows and functions do not match."""
    seen: set[str] = set()
    for module in _TOPICS:
        topic = module.__name__.rpartition(".")[2]
        rows = tomllib.loads((Path(__file__).parent / f"{topic}.toml").read_text(encoding="utf-8"))
        for identifier, row in rows.items():
            check = CHECKS.get(identifier)
            if identifier in seen or (check is not None and not check.__module__.startswith(module.__name__)):
                raise ValueError(f"{identifier} is in {topic}.toml, and is checked or described elsewhere")
            seen.add(identifier)
            yield Rule(id=identifier, topic=topic, check=check, **row)
    if CHECKS.keys() - seen:
        raise ValueError(f"no row describes {', '.join(sorted(CHECKS.keys() - seen))}")


RULES = tuple(read_rules())
_BY_ID = {rule.id: rule for rule in RULES}


def evaluate(context: RuleContext) -> tuple[Finding, ...]:
    """Return all findings: errors first, otherwise in the order of the rule book."""
    findings = [finding for rule in RULES if (finding := rule.find(context)) is not None]
    return tuple(sorted(findings, key=lambda finding: finding.severity != "error"))


def rule_by_id(identifier: str) -> Rule | None:
    """Return the rule with this id; None if there is none."""
    return _BY_ID.get(identifier)

"""Settings that have no effect under other settings: a row makes the rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from finetune_job.api.fetch import SecretKeyRef, SecretRef
from finetune_job.rules.context import RuleContext
from finetune_job.rules.define import OURS, Problem, rule
from finetune_job.rules.fields import spec_field
from finetune_job.rules.rule import Reproduction, Rule

SAME_PLAN = Reproduction(
    "tests/pitfalls/test_no_effect.py::test_what_nothing_reads",
    "no error: the run's plan is the same with and without it",
)


@dataclass(frozen=True)
class NoEffect:
    """Fields that nothing reads under some condition."""

    rule: str
    title: str
    fields: tuple[str, ...]
    """Paths under `spec`. What has its default counts as unset: the API server writes defaults into every object."""
    depends_on: tuple[str, ...]
    """Paths under `spec` of what decides whether they are read."""
    is_unread: Callable[[RuleContext], bool]
    why: str
    """Why they have no effect, after "NoEffect: "."""
    reproduction: Reproduction
    instead: str = ""
    """What to do to give them an effect, before ", or remove"; empty: nothing does."""


def no_effect_rules(module: str, rows: Iterable[NoEffect]) -> tuple[Rule, ...]:
    """The rule of each row. `module`: name of the topic module that holds the rows."""
    return tuple(_no_effect_rule(module, row) for row in rows)


def _no_effect_rule(module: str, row: NoEffect) -> Rule:
    fields = {path: spec_field(path) for path in row.fields}

    @rule(
        row.rule,
        row.title,
        severity="warning",
        reads=(*row.fields, *row.depends_on),
        sources=("this product's API",),
        holds_for=OURS,
        reproduction=row.reproduction,
        module=module,
    )
    def check(context: RuleContext) -> Problem | None:
        written = {path: field.read(context.spec) for path, field in fields.items()}
        unread = {path: value for path, value in written.items() if value not in (None, fields[path].default)}
        if not unread or not row.is_unread(context):
            return None
        path, value = next(iter(unread.items()))
        remove = f"remove {', '.join(unread)}"
        return Problem(
            field=path,
            value=value.name if isinstance(value, SecretRef | SecretKeyRef) else value,
            message=f"NoEffect: {row.why}",
            fix=f"{row.instead}, or {remove}" if row.instead else remove,
            changes=dict.fromkeys(unread),
        )

    return check

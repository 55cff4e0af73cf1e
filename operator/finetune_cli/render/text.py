"""Verdicts, findings and rules as text for a terminal; plain, so that it reads the same in a log."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from finetune_cli.commands.validate import Outcome, Report, Verdict
from finetune_job.plan.run_plan import Choice
from finetune_job.rules.define import shown
from finetune_job.rules.rule import Finding, Rule

WIDTH = 100
"""Columns."""


def report_text(report: Report) -> str:
    """A whole file."""
    return "\n".join(_verdict(verdict) for verdict in report.verdicts) + "\n"


def _verdict(verdict: Verdict) -> str:
    subject = " ".join(part for part in (verdict.kind, verdict.name) if part) or "input"
    lines = [f"{subject}: {verdict.outcome}"]
    lines += [finding_text(finding) for finding in verdict.findings]
    if verdict.outcome is Outcome.ACCEPTED and verdict.choices:
        lines += ["", "  Left open by the manifest, and chosen:", choices_text(verdict.choices)]
    return "\n".join(lines)


def finding_text(finding: Finding) -> str:
    """One finding: field, value, reason, fix."""
    return "\n".join(
        [
            "",
            f"  {finding.severity}: {finding.rule}",
            _entry("field", finding.field),
            _entry("value", finding.value),
            _entry("reason", finding.message),
            _entry("fix", finding.fix),
        ]
    )


def choices_text(choices: Iterable[Choice]) -> str:
    """What the plan chose."""
    rows = [(choice.field.removeprefix("spec."), _choice_value(choice.value), choice.reason) for choice in choices]
    fields, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"    {field:{fields}}  {value:{values}}  {reason}" for field, value, reason in rows)


def _choice_value(value: object) -> str:
    return shown(value)


def rule_text(rule: Rule) -> str:
    """One rule."""
    effect = "refuses the job" if rule.severity == "error" else "warns"
    evidence = "reproduced on the real libraries in tests/pitfalls" if rule.evidence == "reproduced" else "read in the sources"
    return "\n".join(
        [
            f"{rule.id}: {rule.title}",
            _entry("effect", effect),
            _entry("reads", ", ".join(rule.reads)),
            _entry("holds", rule.holds_for),
            _entry("basis", f"{evidence}: {'; '.join(rule.sources)}"),
            "",
        ]
    )


def _entry(label: str, text: str) -> str:
    lead = f"    {label + ':':<8}"
    indent = " " * len(lead)
    return textwrap.fill(text, WIDTH, initial_indent=lead, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)

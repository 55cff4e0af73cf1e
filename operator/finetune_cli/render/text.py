"""Verdicts, findings and rules as text for a terminal; plain, so that it reads the same in a log."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from finetune_cli.checks.validate import Outcome, Report, Verdict
from finetune_job.plan.run_plan import Choice
from finetune_job.rules.cel import Transition, conditions_of
from finetune_job.rules.changes import changes_text
from finetune_job.rules.define import shown
from finetune_job.rules.rule import Finding, Rule

if TYPE_CHECKING:
    from finetune_cli.checks.fix import FixedFile

WIDTH = 100
"""Columns."""


def report_text(report: Report) -> str:
    """All verdicts; each names its file where there are several."""
    has_several = len({verdict.file for verdict in report.verdicts}) > 1
    return "\n".join(_verdict(verdict, has_several) for verdict in report.verdicts) + "\n"


def _verdict(verdict: Verdict, names_file: bool) -> str:
    subject = " ".join(part for part in (verdict.kind, verdict.name) if part) or "input"
    place = f"{verdict.file}: " if names_file and verdict.file else ""
    lines = [f"{place}{subject}: {verdict.outcome}"]
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
            *([_entry("source", finding.source)] if finding.source else []),
        ]
    )


def choices_text(choices: Iterable[Choice]) -> str:
    """What the plan chose."""
    rows = [(choice.field.removeprefix("spec."), _choice_value(choice.value), choice.reason) for choice in choices]
    fields, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"    {field:{fields}}  {value:{values}}  {reason}" for field, value, reason in rows)


def _choice_value(value: object) -> str:
    return shown(value)


_SPEAKS = {
    "ours": "",
    "accelerate": "; it tells of accelerate's path, and this trainer does it right",
    "Trainer": "; it tells of the path of transformers' Trainer, and this trainer does it right",
}


def rule_text(rule: Rule) -> str:
    """One rule, and how to see the failure that it speaks of."""
    effect = "refuses the job" if rule.severity == "error" else "warns"
    lines = [
        f"{rule.id}: {rule.title}",
        _entry("topic", rule.topic.replace("_", " ")),
        _entry("effect", effect + _SPEAKS[rule.speaks_of]),
        _entry("gates", ", ".join(_gates(rule))),
        _entry("reads", ", ".join(rule.reads)),
        _entry("holds", rule.holds_for),
    ]
    if rule.reproduction is not None:
        lines += [
            _entry("shown", f"reproduced on the real libraries: {rule.reproduction.observed}"),
            _entry("test", rule.reproduction.test),
            _entry("rerun", f"make environment && .venv/bin/pytest {rule.reproduction.test}"),
        ]
    else:
        lines.append(_entry("shown", "read in the sources; there is no reproduction"))
    lines.append(_entry("source", "; ".join(rule.sources)))
    short = "; ".join(dict.fromkeys(condition.says for condition in conditions_of(rule)))
    made = "a finding names it for its manifest, and " + (
        "nobody but you can weigh it: finetune validate --fix leaves it"
        if rule.is_weighed
        else "finetune validate --fix -f FILE makes it"
    )
    lines.append(_entry("fix", f"{short}; {made}" if short else made))
    return "\n".join([*lines, ""])


def _gates(rule: Rule) -> list[str]:
    later = [f"preflight ({rule.in_preflight})"] if rule.in_preflight else []
    return [*(["API server"] if conditions_of(rule) else []), "finetune validate", "operator", *later]


def transition_text(transition: Transition) -> str:
    """What only the API server can refuse, because it knows the object before the change."""
    return "\n".join(
        [
            f"{transition.rule}: {transition.title}",
            _entry("effect", "refuses the change"),
            _entry("gates", "API server"),
            _entry("fix", transition.fix),
            "",
        ]
    )


def rules_text(rules: Sequence[Rule]) -> str:
    """All rules, by topic."""
    lines: list[str] = []
    for topic in dict.fromkeys(rule.topic for rule in rules):
        of_topic = [rule for rule in rules if rule.topic == topic]
        lines += [topic.replace("_", " "), *(f"  {rule.severity:8}{rule.id:40}{rule.title}" for rule in of_topic), ""]
    counts = Counter((rule.severity, rule.evidence) for rule in rules)
    said = ", ".join(f"{number} {severity}s {evidence}" for (severity, evidence), number in sorted(counts.items()))
    return "\n".join([*lines, f"{len(rules)} rules: {said}.", ""])


def fixes_text(files: Sequence[FixedFile]) -> str:
    """What was changed, by rule."""
    lines = []
    for file in files:
        for job, finding in file.made:
            lines.append(f"fixed {job}: {changes_text(finding.changes)} ({finding.rule})\n")
    return "".join(lines)


def _entry(label: str, text: str) -> str:
    lead = f"    {label + ':':<8}"
    indent = " " * len(lead)
    return textwrap.fill(text, WIDTH, initial_indent=lead, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)

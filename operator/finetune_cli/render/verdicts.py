"""Formats verdicts, findings and fixes as plain text, the same in a log and on a terminal, and documents as JSON and YAML."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import yaml

from finetune_job.finding import Finding

if TYPE_CHECKING:
    # These import the rules, which commands that only look at a cluster do not need.
    from finetune_cli.checks.fix import FixedFile
    from finetune_cli.checks.validate import Report
    from finetune_job.plan.run_plan import Choice


WIDTH = 100
"""Maximum length of a line in characters."""


def report_text(report: Report) -> str:
    """Return all verdicts as text; each names its file if there are several files."""
    has_several = len({verdict.file for verdict in report.verdicts}) > 1
    lines: list[str] = []
    for verdict in report.verdicts:
        subject = " ".join(part for part in (verdict.kind, verdict.name) if part) or "input"
        place = f"{verdict.file}: " if has_several and verdict.file else ""
        lines.append(f"{place}{subject}: {verdict.outcome}")
        lines += [f"  {verdict.device}"] if verdict.device else []
        lines += [finding_text(finding) for finding in verdict.findings]
        # Only an accepted job has choices.
        if verdict.choices:
            lines += ["", "  Not set in the manifest, so chosen:", choices_text(verdict.choices)]
    return "\n".join([*lines, ""])


def finding_text(finding: Finding) -> str:
    """Return a finding as text: field, value, reason, fix. `finetune explain` has the evidence."""
    return "\n".join(
        [
            "",
            f"  {finding.severity}: {finding.rule}",
            labelled("field", finding.field),
            labelled("value", finding.value),
            labelled("reason", finding.message),
            labelled("fix", finding.fix),
        ]
    )


def choices_text(choices: Iterable[Choice]) -> str:
    """Return the choices of a plan as a table."""
    from finetune_job.rules.rule import format_value

    rows = [(choice.field.removeprefix("spec."), format_value(choice.value), choice.reason) for choice in choices]
    fields, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"    {field:{fields}}  {value:{values}}  {reason}" for field, value, reason in rows)


def fixes_text(files: Sequence[FixedFile]) -> str:
    """List the changes that were made, each with its rule."""
    from finetune_job.rules.rule import changes_text

    lines = []
    for file in files:
        for job, finding in file.made:
            lines.append(f"fixed {job}: {changes_text(finding.changes)} ({finding.rule})\n")
    return "".join(lines)


def labelled(label: str, text: str) -> str:
    """Return `label: text`, indented and wrapped."""
    lead = f"    {label + ': ':<8}"
    indent = " " * len(lead)
    return textwrap.fill(
        text, WIDTH, initial_indent=lead, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def report_document(report: Report) -> dict[str, Any]:
    """Return a report as plain data."""
    return {
        "accepted": report.exit_code == 0,
        "documents": [
            {
                "file": verdict.file,
                "document": verdict.document,
                "kind": verdict.kind,
                "name": verdict.name,
                "outcome": str(verdict.outcome),
                "findings": [finding.model_dump(mode="json") for finding in verdict.findings],
                "device": verdict.device,
                "choices": [choice.model_dump(mode="json") for choice in verdict.choices],
                "plan": verdict.plan.model_dump(mode="json", exclude={"choices"}) if verdict.plan is not None else None,
            }
            for verdict in report.verdicts
        ],
    }


def as_json(content: dict[str, Any]) -> str:
    """Return indented JSON with the keys in their given order. Unprintable characters are escaped, and read back unchanged."""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    return re.sub(r"[^\n -~]", lambda match: match[0] if match[0].isprintable() else json.dumps(match[0])[1:-1], text) + "\n"


def as_yaml(content: dict[str, Any]) -> str:
    """Return block-style YAML with the keys in their given order. Unprintable characters are escaped, and read back unchanged."""
    text = str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    return text if text.replace("\n", "").isprintable() else str(yaml.safe_dump(content, sort_keys=False))

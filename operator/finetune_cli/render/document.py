"""Verdicts as JSON and YAML."""

from __future__ import annotations

import json
from typing import Any

import yaml

from finetune_cli.checks.validate import Report


def report_document(report: Report) -> dict[str, Any]:
    """A whole file as plain data."""
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
                "choices": [choice.model_dump(mode="json") for choice in verdict.choices],
                "plan": verdict.plan.model_dump(mode="json", exclude={"choices"}) if verdict.plan is not None else None,
            }
            for verdict in report.verdicts
        ],
    }


def as_json(content: dict[str, Any]) -> str:
    """Indented, keys in the order given."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def as_yaml(content: dict[str, Any]) -> str:
    """Block style, keys in the order given."""
    return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))

"""Findings of the rule book as they stand in status."""

from __future__ import annotations

from collections.abc import Sequence

from finetune_job.api.status import StatusFinding
from finetune_job.rules.rule import Finding
from finetune_operator.decide.draft import TEXT_LIMIT

FINDINGS_LIMIT = 64


def status_findings(findings: Sequence[Finding]) -> list[StatusFinding]:
    """Findings as they stand in status."""
    return [
        StatusFinding(
            rule=finding.rule,
            severity=finding.severity,
            field=finding.field[:TEXT_LIMIT],
            value=finding.value[:TEXT_LIMIT],
            message=finding.message[:TEXT_LIMIT],
            fix=finding.fix[:TEXT_LIMIT],
            source=finding.source[:TEXT_LIMIT],
        )
        for finding in findings[:FINDINGS_LIMIT]
    ]

"""Findings of the rule book as status shows them."""

from __future__ import annotations

from collections.abc import Sequence

from finetune_job.api.status import StatusFinding
from finetune_job.rules.rule import Finding
from finetune_operator.decide.pass_result import TEXT_LIMIT

FINDINGS_LIMIT = 64


def status_findings(findings: Sequence[Finding]) -> list[StatusFinding]:
    """Findings as status shows them."""
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

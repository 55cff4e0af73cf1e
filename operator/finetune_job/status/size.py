"""A status that etcd can hold: an object has 1.5 MiB, of which the spec may take a third.

Every text of a status is bounded by its schema, but 64 findings of the longest texts together are larger than what is left.
"""

from __future__ import annotations

from collections.abc import Sequence

from finetune_job.api.status import FineTuneJobStatus, StatusFinding

MAX_FINDINGS_BYTES = 256 << 10
"""Of all findings; the attempts, of which only the latest is told at length, take as much again at most."""
SHORTEST = 64


def fitted(status: FineTuneJobStatus) -> FineTuneJobStatus:
    """The status, with shorter texts in its findings where they are too large together."""
    limit = max((len(text) for finding in status.findings for text in _texts(finding)), default=0)
    findings: Sequence[StatusFinding] = status.findings
    while limit > SHORTEST and _bytes(findings) > MAX_FINDINGS_BYTES:
        limit //= 2
        findings = [
            finding.model_copy(update={name: getattr(finding, name)[:limit] for name in _CUT}) for finding in status.findings
        ]
    return status if findings is status.findings else status.model_copy(update={"findings": findings})


_CUT = ("field", "value", "message", "fix", "source")


def _texts(finding: StatusFinding) -> tuple[str, ...]:
    return tuple(getattr(finding, name) for name in _CUT)


def _bytes(findings: Sequence[StatusFinding]) -> int:
    return sum(len(text.encode(errors="surrogatepass")) for finding in findings for text in _texts(finding))

"""Output of `finetune audit` and `finetune reproduce`: what was found, and what was compared."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from finetune_cli.exit_codes import ExitCode
from finetune_cli.local.replay import Interval
from finetune_cli.render.verdicts import finding_text
from finetune_job.finding import Finding


@dataclass(frozen=True)
class AuditEnd:
    """How an audit or a reproduction ended."""

    run: str
    findings: Sequence[Finding]
    intervals: Sequence[Interval] = ()
    """Intervals that were computed again."""
    available: int = 0
    """Number of intervals from which `intervals` were chosen."""
    seed: int | None = None
    has_compared_result: bool = False
    has_compared_merged: bool = False
    run_again_as: str = ""
    """The job of a cluster that ran the plan again; empty: the plan ran on this machine."""

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.REFUSED if any(finding.severity == "error" for finding in self.findings) else ExitCode.DONE


def audit_text(end: AuditEnd) -> str:
    """Return the findings, and what was compared, as text."""
    lines = [finding_text(finding) for finding in end.findings]
    verdict = "nothing differs" if end.exit_code is ExitCode.DONE else "different, as the findings above say"
    lines += ["", f"{end.run}: {verdict}"]
    if end.seed is not None:
        shown = ", ".join(map(str, end.intervals))
        lines.append(f"  computed again: {shown} ({len(end.intervals)} of {end.available} intervals, --seed {end.seed})")
    if end.run_again_as:
        lines.append(f"  run again as: {end.run_again_as}")
    if end.has_compared_result:
        merged = " and the merged model" if end.has_compared_merged else ""
        how = "by the SHA-256 of each file" if end.run_again_as else "byte for byte"
        lines.append(f"  compared: the trained result{merged}, {how}")
    return "\n".join([*lines, ""])


def audit_document(end: AuditEnd) -> dict[str, Any]:
    """Return, as plain data, how an audit ended."""
    return {
        "outcome": "same" if end.exit_code is ExitCode.DONE else "different",
        "run": end.run,
        "findings": [finding.model_dump(mode="json") for finding in end.findings],
        "intervals": [{"start": interval.start, "end": interval.end} for interval in end.intervals],
        "available": end.available,
        "seed": end.seed,
        "comparedResult": end.has_compared_result,
        "comparedMerged": end.has_compared_merged,
        "runAgainAs": end.run_again_as or None,
    }


def device_note(trained: Set[str], again: Set[str]) -> str:
    """Return a note if the devices alone may explain a difference. trained: the run's devices; again: the replay's."""
    if again == trained and again - {"cpu"}:
        return f" (computed on {', '.join(sorted(again))}, whose kernels may add up in varying order: no proof either way)"
    if not again or not trained or again == trained:
        return ""
    return f" (trained on {', '.join(sorted(trained))}, computed again on {', '.join(sorted(again))}: devices round differently)"

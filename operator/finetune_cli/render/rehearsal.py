"""A rehearsal as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def stage_text(stage: Mapping[str, Any]) -> str:
    """One stage that has ended."""
    problem = str(stage["problem"]).strip().splitlines()
    ending = "right" if not problem else f"wrong: {problem[0]}"
    return f"  {stage['stage']:8} {stage['seconds']:5.1f} s  {ending}"


def rehearsal_text(job: str, report: Mapping[str, Any]) -> str:
    """The verdict, and what was changed for it."""
    verdicts = {
        "Passed": "passed: every stage went right on a small twin of the model",
        "Failed": "failed: the job would not go right",
        "NotDone": "could not be tried to the end",
    }
    verdict = verdicts.get(report["verdict"], report["verdict"])
    cost = f"{report['seconds']:.1f} s, {report['peak_memory_bytes'] / 2**20:.0f} MiB, {report['parameters']} parameters"
    lines = ["", f"{job}: the rehearsal {verdict} ({cost})"]
    if report["changes"]:
        lines += ["", "  Changed for the rehearsal:", *(f"    {change}" for change in report["changes"])]
    return "\n".join(lines)

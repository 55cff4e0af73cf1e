"""Preflight's rehearsal beside full runs of the same settings: does the twin come to what the run came to?

A rehearsal takes many seconds, so a sample of the recorded cases is asked: `python -m tests.sweep --rehearse N`.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from finetune_trainer.inspection.report import Verdict
from finetune_trainer.roles.rehearse import ModelProcess
from tests.sweep.case import Case
from tests.sweep.explanations import POLICY
from tests.sweep.material import claims_of, make_base, plan_of

Agreement = Literal["agrees", "accepts what fails", "refuses what works", "not done"]


@dataclass(frozen=True)
class Rehearsed:
    """One case."""

    case: Case
    agreement: Agreement
    observed: str
    """What the full run came to."""
    said: str
    """What the rehearsal says."""
    seconds: float

    def text(self) -> str:
        """For people."""
        return f"{self.agreement}: {self.case.id}\n    full run: {self.observed}\n    rehearsal: {self.said}"

    def entry(self) -> dict[str, Any]:
        """What is kept."""
        return {
            "id": self.case.id,
            "agreement": self.agreement,
            "observed": self.observed[:300],
            "said": self.said[:600],
            "seconds": round(self.seconds, 1),
        }


def sample(recorded: dict[str, dict[str, Any]], count: int, seed: int) -> list[dict[str, Any]]:
    """Recorded cases, half of them such that fail: of those, ones that a gate refuses for what happens, not on principle."""
    draw = random.Random(f"rehearsals {seed}")
    working = sorted(key for key, entry in recorded.items() if entry["kind"] == "accepted")
    failing = sorted(
        key
        for key, entry in recorded.items()
        if entry["kind"] in ("refused", "false accept")
        and entry["outcome"] != "works"
        and not set(entry["refused_by"]) & {*POLICY, "schema", "offload-without-gpu"}
    )
    chosen = draw.sample(working, min(count - count // 2, len(working))) + draw.sample(failing, min(count // 2, len(failing)))
    return [recorded[key] for key in chosen]


def rehearsed(entry: dict[str, Any], material: Path) -> Rehearsed:
    """Rehearse a case whatever the other gates say of it, and compare."""
    case = Case(entry["values"])
    claims = Path(tempfile.mkdtemp(prefix=f"{case.id}-", dir=material))
    started = time.monotonic()
    try:
        context = claims_of(case, plan_of(case), material, claims / "claims")
        make_base(case, context)
        with ModelProcess(context.with_trained_rows()) as process:
            process.begin_rehearsal()
            report = process.rehearsal()
    finally:
        shutil.rmtree(claims, ignore_errors=True)
    said = "; ".join(f"{finding.rule}: {finding.message}" for finding in report.findings) or report.verdict.value
    agreement = _agreement(report.verdict, entry["outcome"] == "works")
    return Rehearsed(case, agreement, entry["observed"], said, time.monotonic() - started)


def _agreement(verdict: Verdict, works: bool) -> Agreement:
    if verdict not in (Verdict.PASSED, Verdict.FAILED):
        return "not done"
    if (verdict is Verdict.PASSED) is works:
        return "agrees"
    return "refuses what works" if works else "accepts what fails"

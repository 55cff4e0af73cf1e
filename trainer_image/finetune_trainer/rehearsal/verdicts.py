"""What a rehearsal saw -> a finding."""

from __future__ import annotations

import re
from pathlib import Path

from finetune_job.catalogue.book import make_finding
from finetune_job.failures import FailureClass
from finetune_job.finding import Finding
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.inspection.report import TITLES, Stage

FAILED, NOT_DONE = "rehearsal-failed", "rehearsal-not-done"
SKIP = "set spec.preflight.rehearsal: Skip"
_FIELD = re.compile(r"^(spec(?:\.[A-Za-z0-9_\[\]]+)+): ")
_LONGEST_MESSAGE = 600


class StageFailure(Exception):  # noqa: N818 - what was looked for, not an error of this program
    """The job would fail in this stage, or go wrong silently."""

    def __init__(self, stage: Stage, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.stage, self.hint = stage, hint


class Inconclusive(Exception):  # noqa: N818 - see StageFailure
    """What happened says nothing about the job: no scaled-down model could be made, or this machine does not let it run."""


def failure_of_stage(stage: Stage, message: str, hint: str, failure: FailureClass | None) -> Exception:
    """StageFailure, or Inconclusive if this machine's memory or disk ran out."""
    if failure in (FailureClass.HOST_OUT_OF_MEMORY, FailureClass.DISK_FULL):
        return Inconclusive(message)
    return StageFailure(stage, message, hint)


def failed_finding(problem: StageFailure, plan: RunPlan, root: Path) -> Finding:
    """The refusal. A message of ours names the field itself."""
    message = _shortened(str(problem), root)
    named = _FIELD.match(message)
    return make_finding(
        FAILED,
        field=named[1] if named else "spec.method",
        value=plan.method.type.value,
        message=f"tried on a scaled-down model, the stage '{TITLES[problem.stage]}' ({problem.stage.value}) fails: "
        f"{message.removeprefix(named[0]) if named else message}",
        fix=problem.hint or f"change the settings that this names; if only the scaled-down model is at fault, {SKIP}",
    )


def not_done_finding(reason: str, root: Path) -> Finding:
    """A warning: the job continues without having been tried."""
    return make_finding(
        NOT_DONE,
        field="spec.preflight.rehearsal",
        value="Run",
        message=f"the job could not be tried to the end on a scaled-down model: {_shortened(reason, root)}",
        fix=f"nothing needs to change; to do without the attempt, {SKIP}",
        changes={"spec.preflight.rehearsal": "Skip"},
    )


def _shortened(message: str, root: Path) -> str:
    text = message.replace(str(root), "<rehearsal>").strip()
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]}..."

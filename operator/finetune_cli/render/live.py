"""A run as it goes: a bar for training, a line for each role that ended."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from finetune_cli.render.text import finding_text
from finetune_job.failures import Outcome, TerminationReport
from finetune_job.names import Role
from finetune_job.progress import Progress
from finetune_job.rules.rule import Finding

_WORDS = {
    Role.FETCH: "fetching model and data",
    Role.PREFLIGHT: "checking model and data",
    Role.TRAIN: "training",
    Role.MERGE: "merging and verifying",
    Role.PUBLISH: "publishing",
}


class LiveView:
    """The audience of a local run on a terminal; in a file only the lines appear."""

    def __init__(self, console: Console, job: str) -> None:
        self._console, self._job = console, job
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> LiveView:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def started(self, role: Role, attempt: int, output: Path) -> None:
        """A role begins; its output goes to a file."""
        again = f", attempt {attempt}" if attempt else ""
        self._console.print(f"{self._job}: {_WORDS[role]}{again} (output: {output})", markup=False, soft_wrap=True)
        if self._console.is_terminal:
            self._task = self._bars.add_task(_WORDS[role], total=None, facts="")

    def progressed(self, progress: Progress) -> None:
        """Rank 0 has answered."""
        if self._task is not None:
            self._bars.update(self._task, completed=progress.step, total=progress.total_steps, facts=_facts(progress))

    def ended(self, report: TerminationReport, seconds: float) -> None:
        """A role has ended."""
        if self._task is not None:
            self._bars.remove_task(self._task)
            self._task = None
        said = f": {report.message}" if report.message else ""
        kind = f" ({report.failure})" if report.failure else ""
        self._console.print(
            f"{self._job}: {report.role} {_ending(report.outcome)}{kind} after {seconds:.1f} s{said}", markup=False, soft_wrap=True
        )
        for finding in report.findings:
            shown = Finding.model_validate(finding.model_dump())
            self._console.print(finding_text(shown), markup=False, soft_wrap=True)
        # Findings carry their own fixes; the hint repeats the first.
        if report.outcome is not Outcome.SUCCEEDED and report.hint and not report.findings:
            self._console.print(f"  {report.hint}", markup=False, soft_wrap=True)

    def restarting(self, report: TerminationReport, pause_seconds: float) -> None:
        """The same role is tried again."""
        pause = f" in {pause_seconds:.0f} s" if pause_seconds else ""
        self._console.print(f"{self._job}: {report.role} starts again{pause}", markup=False, soft_wrap=True)


def _ending(outcome: Outcome) -> str:
    return {Outcome.SUCCEEDED: "succeeded", Outcome.REFUSED: "refused the job", Outcome.FAILED: "failed"}[outcome]


def _facts(progress: Progress) -> str:
    parts = []
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.3f}")
    if progress.eval_loss is not None:
        parts.append(f"held out {progress.eval_loss:.3f}")
    if progress.tokens_per_second is not None:
        parts.append(f"{progress.tokens_per_second:.0f} tokens/s")
    if progress.seconds_left:
        parts.append(f"{timedelta(seconds=round(progress.seconds_left))} left")
    return "  ".join(parts)

"""Output of a local run: a bar for training if it goes to a terminal, a line for each role that has ended, and a summary.

A file gets only lines, at least one every half minute.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from finetune_cli.exit_codes import ExitCode
from finetune_cli.local.role_output import SaidLine
from finetune_cli.local.summary import Summary
from finetune_cli.render.signs_of_life import SILENCE_SECONDS, SignsOfLife
from finetune_cli.render.verdicts import finding_text
from finetune_job.api.enumerations import MergeBase
from finetune_job.failures import FailureClass, Outcome, TerminationReport
from finetune_job.names import Role
from finetune_job.progress import Progress as TrainingProgress

WORK = {
    Role.FETCH: "fetching model and data",
    Role.PREFLIGHT: "checking model and data",
    Role.TRAIN: "training",
    Role.MERGE: "merging and verifying",
    Role.PUBLISH: "publishing",
}
WAITING_SECONDS = 5.0
"""Shortest time between two lines about failed requests, because several files may be waiting at the same time."""
_HEADS = {
    ExitCode.DONE: "Done.",
    ExitCode.REFUSED: "Refused: nothing was trained.",
    ExitCode.FAILED: "Failed.",
    ExitCode.INTERRUPTED: "Interrupted. Run the same command again to continue.",
}


class View:
    """The output of a long-running command: a bar on a terminal, or lines in a file, at least one every half minute."""

    def __init__(
        self,
        console: Console,
        columns: Sequence[ProgressColumn] = (),
        *,
        prefix: str = "",
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        """columns: columns of the bar; empty: there is no bar. prefix: start of the lines that say what is still being done."""
        self._console = console
        # This is checked only once, because the bar has to be stopped even if the terminal is gone by then.
        self._draws = console.is_terminal and bool(columns)
        self._signs = SignsOfLife(lambda line: self._print(f"{prefix}{line}"), silence_seconds=silence_seconds)
        self._bars = Progress(*columns, console=console, transient=True)

    def __enter__(self) -> Self:
        if self._draws:
            self._bars.start()  # the bar moves and shows the time, so no lines are needed
        else:
            self._signs.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._draws:
            self._bars.stop()
        else:
            self._signs.__exit__(*exception)

    def _print(self, text: str) -> None:
        self._signs.spoken()
        self._console.print(text, markup=False, soft_wrap=True)


class LiveView(View):
    """A `RunListener` that shows a run on a terminal, or only prints lines if the output goes to a file."""

    def __init__(self, console: Console, job: str, *, silence_seconds: float = SILENCE_SECONDS) -> None:
        facts = (MofNCompleteColumn(), TextColumn("{task.fields[facts]}"), TimeElapsedColumn())
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), *facts)
        super().__init__(console, columns, prefix=f"{job}: ", silence_seconds=silence_seconds)
        self._job = job
        self._told_waiting = -WAITING_SECONDS
        self._task: TaskID | None = None

    def started(self, role: Role, attempt: int, output: Path) -> None:
        """Print that a role begins, and the path of its output file."""
        again = f", attempt {attempt}" if attempt else ""
        self._print(f"{self._job}: {WORK[role]}{again} (output: {output})")
        self._signs.doing(WORK[role])
        if self._draws:
            self._task = self._bars.add_task(WORK[role], total=None, facts="")

    def progressed(self, progress: TrainingProgress) -> None:
        """Show the progress that rank 0 has reported."""
        self._signs.detail(f"step {progress.step} of {progress.total_steps}  {progress_text(progress)}".rstrip())
        if self._task is not None:
            self._bars.update(self._task, completed=progress.step, total=progress.total_steps, facts=progress_text(progress))

    def said(self, line: SaidLine) -> None:
        """Keep a line of the role's log for the next sign of life; a line about a wait is also printed at once."""
        self._signs.detail(line.message)
        now = time.monotonic()
        if line.is_waiting and now - self._told_waiting >= WAITING_SECONDS:
            self._told_waiting = now
            self._print(f"{self._job}: waiting: {line.message}")

    def ended(self, report: TerminationReport, seconds: float) -> None:
        """Print how a role has ended."""
        if self._task is not None:
            self._bars.remove_task(self._task)
            self._task = None
        self._signs.doing("")
        details = f": {report.message}" if report.message else ""
        is_interrupted = report.failure is FailureClass.PREEMPTED
        kind = f" ({report.failure})" if report.failure and not is_interrupted else ""
        endings = {Outcome.SUCCEEDED: "succeeded", Outcome.REFUSED: "refused the job", Outcome.FAILED: "failed"}
        ending = "interrupted" if is_interrupted else endings[report.outcome]
        if report.role == Role.PREFLIGHT and "rehearsal" in report.facts:
            details += f"; rehearsal: {report.facts['rehearsal']}"
        self._print(f"{self._job}: {report.role} {ending}{kind} after {seconds:.1f} s{details}")
        for finding in report.findings:
            self._print(finding_text(finding))
        # Findings carry their own fixes, and the hint repeats the first of these.
        if report.outcome is not Outcome.SUCCEEDED and report.hint and not report.findings:
            self._print(f"  {report.hint}")

    def restarting(self, report: TerminationReport, pause_seconds: float) -> None:
        """Print that the same role will be tried again."""
        pause = f" in {pause_seconds:.0f} s" if pause_seconds else ""
        self._print(f"{self._job}: {report.role} starts again{pause}")
        self._signs.doing(f"waiting to start {report.role} again{pause}")


def progress_text(progress: TrainingProgress) -> str:
    """Return losses, pace and the remaining time as text."""
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


def summary_text(code: ExitCode, summary: Summary) -> str:
    """Return losses, results, verification and time as text."""
    rows: list[tuple[str, str]] = []
    if summary.losses is not None:
        kind = "held-out loss" if summary.losses.held_out else "training loss"
        rows.append((kind, f"{summary.losses.first:.4f} before, {summary.losses.last:.4f} after"))
    if code is not ExitCode.DONE and summary.step:
        rows.append(("last step", str(summary.step)))
    if code is ExitCode.DONE:
        if summary.address is not None:
            rows.append(("published at", summary.address))
        if summary.adapter_address is not None:
            rows.append(("adapter at", summary.adapter_address))
        for label, path in (("adapter", summary.adapter), ("merged model", summary.merged)):
            if path is not None:
                rows.append((label, str(path)))
    if code is ExitCode.DONE or summary.has_failed_verification:
        rows += verification_rows(summary.figures)
        if summary.verification is not None:
            rows.append(("report", str(summary.verification)))
    rows.append(("workspace", str(summary.workspace)))
    if summary.restarts:
        rows.append(("restarts", str(summary.restarts)))
    rows.append(("time", f"{summary.seconds:.1f} s"))
    return "\n".join(["", _HEADS[code], *row_lines(rows), ""])


def summary_document(summary: Summary) -> dict[str, Any]:
    """Return the summary as plain data; missing values are null."""
    losses = summary.losses
    return {
        "losses": None if losses is None else {"first": losses.first, "last": losses.last, "heldOut": losses.held_out},
        "step": summary.step,
        "adapter": _path(summary.adapter),
        "merged": _path(summary.merged),
        "publishedAt": summary.address,
        "adapterPublishedAt": summary.adapter_address,
        "verification": dict(summary.figures) or None,
        "report": _path(summary.verification),
        "workspace": str(summary.workspace),
        "restarts": summary.restarts,
        "seconds": round(summary.seconds, 1),
    }


def _path(path: Path | None) -> str | None:
    return None if path is None else str(path)


def row_lines(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return lines with labels and their texts in two columns."""
    return [f"  {label + ':':<15}{text}" for label, text in rows]


def verification_rows(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return rows with the most important figures; the report has all of them."""
    if "passed" not in figures:
        return []
    parts = ["passed" if figures["passed"] else "FAILED"]
    tensors, logits = figures.get("tensors") or {}, figures.get("logits") or {}
    if "num_changed" in tensors:
        parts.append(f"{tensors['num_changed']} tensors changed, {tensors.get('num_untouched', 0)} untouched")
    if "mean_kl" in logits:
        parts.append(f"mean KL {logits['mean_kl']:.2g}")
    if "top1_agreement" in logits:
        parts.append(f"same token {logits['top1_agreement']:.1%}")
    rows = [("verification", ", ".join(parts))]
    other = figures.get("other_logits")
    if isinstance(other, Mapping) and "mean_kl" in other:
        against = "original" if figures.get("merged_onto") == MergeBase.DEQUANTIZED else "packed"
        figure = f"mean KL {other['mean_kl']:.2g}, same token {other.get('top1_agreement', 0):.1%}"
        rows.append(("rounding", f"against the adapter on the {against} base, whose weights are rounded otherwise: {figure}"))
    return rows

"""A merge as it goes, and its last words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TransferSpeedColumn
from rich.progress import Progress as Bars

from finetune_cli.exit_codes import ExitCode
from finetune_cli.local.merge_process import MergeEnd, MergeOrder
from finetune_cli.render.summary import row_lines, verification_rows

_HEADS = {
    ExitCode.DONE: "Merged.",
    ExitCode.REFUSED: "Refused: nothing was merged.",
    ExitCode.UNUSABLE: "Nothing was merged.",
    ExitCode.FAILED: "Failed.",
    ExitCode.INTERRUPTED: "Interrupted. Run the same command again to continue.",
}


class MergeView:
    """A bar of bytes on a terminal; in a file only the last words appear."""

    def __init__(self, console: Console) -> None:
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bars.add_task("reading headers", total=None)

    def __enter__(self) -> MergeView:
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def progressed(self, written: int, total: int) -> None:
        """So many bytes of so many are written."""
        self._bars.update(self._task, description="merging", completed=written, total=total)

    def verifying(self) -> None:
        """Everything is written."""
        self._bars.update(self._task, description="verifying")


def merge_text(end: MergeEnd, order: MergeOrder) -> str:
    """Where the model is, what its verification said, and what it took."""
    report = end.report
    rows: list[tuple[str, str]] = []
    if "output" in report:
        rows.append(("merged model", str(report["output"])))
    figures = report.get("verification")
    if isinstance(figures, Mapping):
        rows += verification_rows(figures)
    elif end.exit_code is ExitCode.DONE and not order.verify:
        rows.append(("verification", "none was asked for"))
    if "verification_page" in report:
        rows.append(("report", str(report["verification_page"])))
    rows += _figures(report)
    said = [*(f"  {line}" for line in end.said.splitlines()), ""] if end.said else []
    return "\n".join(["", _HEADS[end.exit_code], *said, *row_lines(rows), ""])


def _figures(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    if "seconds" not in report or "bytes_written" not in report:
        return []
    return [("written", f"{report['bytes_written'] / 1e9:.2f} GB in {report['seconds']:.1f} s")]

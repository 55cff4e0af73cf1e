"""`finetune merge`: merges adapters into a base model on disk, and writes a verified model to another directory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TransferSpeedColumn

from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_cli.local.launch import Interruption, check_trainer
from finetune_cli.local.programs import MergeEnd, MergeOrder, merge_directories
from finetune_cli.render.run import View, row_lines, verification_rows
from finetune_cli.render.signs_of_life import SILENCE_SECONDS
from finetune_job.api.base import SIZE_PATTERN
from finetune_job.api.method import QuantizationSpec

_HEADS = {
    ExitCode.DONE: "Merged.",
    ExitCode.REFUSED: "Refused: nothing was merged.",
    ExitCode.UNUSABLE: "Nothing was merged.",
    ExitCode.FAILED: "Failed.",
    ExitCode.INTERRUPTED: "Interrupted. Run the same command again to continue.",
}


def merge(order: MergeOrder, console: Console) -> MergeEnd:
    """Merge, and show the progress on the console. Raises LocalError."""
    check_order(order)
    check_trainer()
    with MergeView(console) as view, Interruption() as interruption:
        ending = "verifying" if order.verify else "finishing"
        return merge_directories(order.command(), interruption, view.progressed, lambda: view.begins(ending))


def check_order(order: MergeOrder) -> None:
    """Check the arguments. Raises LocalError if they alone show that the merge cannot work."""
    adapters = [("--adapter", adapter, "adapter_config.json") for adapter in order.adapters]
    inputs = [("--base", order.base, "config.json"), *adapters]
    for option, directory, file in inputs:
        if not (directory / file).is_file():
            raise LocalError(f"{option} {directory} is not a directory with {file}; give one that save_pretrained wrote")
    if order.prompts is not None and not order.prompts.is_file():
        raise LocalError(f"--prompts {order.prompts} is not a file; give a text file with a prompt on each line")
    if order.prompts is not None and not order.verify:
        raise LocalError(f"--prompts {order.prompts} has no effect with --no-verify; leave one of the two out")
    if not re.fullmatch(SIZE_PATTERN, order.max_shard_size):
        raise LocalError(f"--max-shard-size {order.max_shard_size} is not a size; write it as in 5GB or 512Mi")
    if order.quantization is not None:
        try:
            QuantizationSpec.model_validate_json(order.quantization)
        except ValueError as error:
            raise LocalError(
                f"--quantization {order.quantization}: {error}; write it as spec.method.quantization of a job"
            ) from error
    output = order.output.resolve()
    for option, directory, _ in inputs:
        if output.is_relative_to(directory.resolve()) or directory.resolve().is_relative_to(output):
            raise LocalError(f"--output {order.output}: it overlaps with {option} {directory}; write to another directory")


class MergeView(View):
    """Shows a bar of written bytes on a terminal, or one line per stage if the output goes to a file."""

    def __init__(self, console: Console, *, silence_seconds: float = SILENCE_SECONDS) -> None:
        facts = (DownloadColumn(), TransferSpeedColumn(), TimeElapsedColumn())
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), *facts)
        super().__init__(console, columns, silence_seconds=silence_seconds)
        self._stage = ""
        self._task = self._bars.add_task("reading headers", total=None)

    def __enter__(self) -> Self:
        super().__enter__()
        self.begins("reading headers")
        return self

    def progressed(self, written: int, total: int) -> None:
        """Show how many of the bytes have been written."""
        self.begins("merging")
        self._signs.detail(f"{written / 1e9:.1f} of {total / 1e9:.1f} GB written")
        self._bars.update(self._task, completed=written, total=total)

    def begins(self, stage: str) -> None:
        """Show that a stage begins, unless it is the current one."""
        if stage == self._stage:
            return
        self._stage = stage
        self._bars.update(self._task, description=stage)
        if not self._draws:
            self._print(stage)
        self._signs.doing(stage)


def merge_text(end: MergeEnd, order: MergeOrder) -> str:
    """Say where the model is, what its verification found, and how long it took."""
    report = end.report
    rows: list[tuple[str, str]] = []
    if "output" in report:
        rows.append(("merged model", str(report["output"])))
    figures = report.get("verification")
    if isinstance(figures, Mapping):
        rows += verification_rows(figures)
    elif end.exit_code is ExitCode.DONE and not order.verify:
        rows.append(("verification", "not requested"))
    if "verification_page" in report:
        rows.append(("report", str(report["verification_page"])))
    if report.get("left_out"):
        rows.append(
            ("left out", f"{', '.join(map(str, report['left_out']))}: in the base's directory, but not listed in its index")
        )
    if "seconds" in report and "bytes_written" in report:
        rows.append(("written", f"{report['bytes_written'] / 1e9:.2f} GB in {report['seconds']:.1f} s"))
    remarks = [*end.said.splitlines(), *(f"warning: {text}" for text in report.get("warnings", ()))]
    message = [*(f"  {line}" for line in remarks), ""] if remarks else []
    return "\n".join(["", _HEADS[end.exit_code], *message, *row_lines(rows), ""])


def merge_document(end: MergeEnd) -> dict[str, Any]:
    """Return the report of the process and its outcome as plain data."""
    return {"outcome": end.exit_code.name.lower(), "message": end.said or None, **end.report}

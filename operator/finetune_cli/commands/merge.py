"""`finetune merge`: adapters and a base on disk -> a merged model, verified, in another directory."""

from __future__ import annotations

import re
from pathlib import Path

from rich.console import Console

from finetune_cli.exit_codes import ExitCode
from finetune_cli.local.errors import LocalError
from finetune_cli.local.launch import Interruption
from finetune_cli.local.merge_process import MergeOrder, merge_directories
from finetune_cli.local.trainer import check_trainer
from finetune_cli.render.merge import MergeView, merge_text
from finetune_job.api.base import SIZE_PATTERN
from finetune_job.api.method import QuantizationSpec


def merge(order: MergeOrder) -> ExitCode:
    """Merge. Raises LocalError."""
    check_order(order)
    check_trainer()
    console = Console(highlight=False)
    with MergeView(console) as view, Interruption() as interruption:
        end = merge_directories(order.command(), interruption, view.progressed, view.verifying)
    console.print(merge_text(end, order), markup=False, end="", soft_wrap=True)
    return end.exit_code


def check_order(order: MergeOrder) -> None:
    """Raises LocalError where the arguments alone show that this cannot work."""
    inputs = [("--base", order.base, "config.json"), *(("--adapter", one, "adapter_config.json") for one in order.adapters)]
    for option, directory, file in inputs:
        if not (directory / file).is_file():
            raise LocalError(f"{option} {directory}: is not a directory with {file}; give what save_pretrained has written")
    if order.prompts is not None and not order.prompts.is_file():
        raise LocalError(f"--prompts {order.prompts}: is not a file; give a text file with a prompt on each line")
    if order.prompts is not None and not order.verify:
        raise LocalError(f"--prompts {order.prompts}: has no effect with --no-verify; leave one of the two out")
    if not re.fullmatch(SIZE_PATTERN, order.max_shard_size):
        raise LocalError(f"--max-shard-size {order.max_shard_size}: is not a size; write it as in 5GB or 512Mi")
    if order.quantization is not None:
        try:
            QuantizationSpec.model_validate_json(order.quantization)
        except ValueError as error:
            raise LocalError(
                f"--quantization {order.quantization}: {error}; write it as spec.method.quantization of a job"
            ) from error
    for option, directory, _ in inputs:
        if _is_within(order.output, directory) or _is_within(directory, order.output):
            raise LocalError(f"--output {order.output}: it overlaps with {option} {directory}; write to another directory")


def _is_within(inner: Path, outer: Path) -> bool:
    return inner.resolve().is_relative_to(outer.resolve())

"""`python -m finetune_trainer.roles.merge_command`: merges adapters into a base, and verifies the result before it gets its name.

Standard output: JSON lines {"written": n, "total": n}, at most one per second, and at the end {"report": {...}}. An error is one
message on standard error, and the exit code is that of its failure class. A stopped run continues when it is started again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_job.api.base import size_bytes
from finetune_job.api.enumerations import MergeBase
from finetune_job.api.output import MergeSpec
from finetune_job.failures import EXIT_CODES
from finetune_job.layout import MergedPaths
from finetune_trainer.errors import ConfigError, classify
from finetune_trainer.files import FileDigests
from finetune_trainer.processes.start import die_with, end, keep_bitsandbytes_out, preload
from finetune_trainer.weights.errors import DeviceUnavailableError
from finetune_trainer.weights.headers import OUTPUT_DTYPES, read_checkpoint

if TYPE_CHECKING:
    from finetune_trainer.merge.changes import Quantization
    from finetune_trainer.merge.merge_adapter import MergeOptions

HOST = "cpu"
SECONDS_BETWEEN_LINES = 1.0
VERIFICATION = "finetune_trainer.verify.verification"


def parser() -> argparse.ArgumentParser:
    """Build the parser of the arguments."""
    arguments = argparse.ArgumentParser(prog="python -m finetune_trainer.roles.merge_command", description=__doc__)
    arguments.add_argument("--parent", type=int, help="process with which this one ends")
    arguments.add_argument("--base", type=Path, required=True, help="directory of the base model (safetensors)")
    arguments.add_argument(
        "--adapter",
        type=Path,
        required=True,
        action="append",
        help="directory of a PEFT adapter; several are merged in this order",
    )
    arguments.add_argument("--output", type=Path, required=True, help="directory that will hold the merged model")
    arguments.add_argument("--dtype", choices=sorted(OUTPUT_DTYPES), help="element type of the result; unset: the base's own")
    arguments.add_argument("--max-shard-size", default=MergeSpec().max_shard_size, help="largest weight file, as in 5GB")
    arguments.add_argument(
        "--base-form",
        type=MergeBase,
        choices=[MergeBase.ORIGINAL, MergeBase.DEQUANTIZED],
        default=MergeBase.ORIGINAL,
        help="weights that an adapter of QLoRA or QDoRA is added to: as stored, or what it saw in training",
    )
    arguments.add_argument(
        "--quantization", help='how a QLoRA or QDoRA training packed its base, as in a job: {"quantType": "nf4"}'
    )
    arguments.add_argument(
        "--device", default=HOST, help="device on which the logits of base, adapter and merged model are computed, cpu or cuda"
    )
    arguments.add_argument("--verify", action=argparse.BooleanOptionalAction, default=True, help="compare with base and adapter")
    arguments.add_argument(
        "--force", action="store_true", help="merge although an adapter records another base, or has no effect"
    )
    arguments.add_argument("--prompts", type=Path, help="lines of text or of JSON arrays of token ids to verify with")
    return arguments


def _progress_lines() -> Callable[[int, int], None]:
    """Make a function that prints the progress of a merge, at most once per second."""
    last = float("-inf")

    def print_line(written: int, total: int) -> None:
        nonlocal last
        if written == total or time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            print(json.dumps({"written": written, "total": total}), flush=True)

    return print_line


class _Warnings(logging.Handler):
    """Keeps the warnings of the merge for the report, because standard error is shown only after a failure."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Merge and verify. Raises MergeError, TrainerError, OSError."""
    _require_device(arguments.device)
    digests = FileDigests()
    if arguments.verify:
        # Hash while torch is imported, which occupies only one processor.
        digests.begin(arguments.base / name for name in read_checkpoint(arguments.base).file_bytes)
    from finetune_trainer.merge.merge_adapter import MergeOptions, merge_adapter

    output: Path = arguments.output
    quantization = _quantization(arguments)
    reports = output.with_name(f"{output.name}.verification.json")
    paths = MergedPaths(output, reports, reports.with_suffix(".md"))
    options = MergeOptions(
        base=arguments.base,
        adapters=tuple(arguments.adapter),
        output=paths.current if arguments.verify else output,
        dtype=arguments.dtype,
        max_shard_bytes=_shard_bytes(arguments.max_shard_size),
        quantization=quantization if arguments.base_form is MergeBase.DEQUANTIZED else None,
        refuses_misfits=not arguments.force,
    )
    if arguments.verify:
        preload(VERIFICATION)
    warnings = _Warnings()
    logging.getLogger("finetune_trainer.merge").addHandler(warnings)
    merged = merge_adapter(options, _progress_lines(), partial(_require_class, options) if arguments.verify else None)
    report = {**dataclasses.asdict(merged), "output": str(output), "warnings": warnings.messages}
    if not arguments.verify:
        return report
    return report | _verify(arguments, options, paths, quantization, merged.num_rows, digests=digests)


def _require_class(options: MergeOptions) -> None:
    """Raise UnverifiableModelError if the model cannot be verified and would be merged in vain."""
    from finetune_trainer.verify.model_class import model_builder

    model_builder(options.base, options.adapters)


def _require_device(name: str) -> None:
    """Raise DeviceUnavailableError before the merge if the verification cannot use this device."""
    if name == HOST:
        return
    # Imported only if a device must be checked: on the CPU, the merge does not wait for this import.
    import torch

    if torch.device(name).type == "cuda" and not torch.cuda.is_available():
        raise DeviceUnavailableError(
            f"device {name}: torch finds no GPU on this machine (there is no driver, or the container has no GPU). Set device "
            "to cpu."
        )


def _verify(
    arguments: argparse.Namespace,
    options: MergeOptions,
    paths: MergedPaths,
    quantization: Quantization | None,
    num_rows: int | None,
    *,
    digests: FileDigests,
) -> dict[str, Any]:
    """Verify, and return the entries to add to the report. Raises VerificationError, and what `verify_and_name` raises."""
    from finetune_trainer.verify.prompts import default_prompts
    from finetune_trainer.verify.verification import gate_of_merge, verify_and_name, verify_merge

    if arguments.prompts is None:
        prompts = default_prompts(options.base, num_rows)
    else:
        prompts = read_prompts(arguments.prompts, options.output)
    verify = partial(
        verify_merge,
        base=options.base,
        adapters=options.adapters,
        prompts=prompts,
        gate=gate_of_merge(options.base, options.dtype),
        quantization=quantization,
        merged_onto=arguments.base_form,
        # There is no record of what the adapter was trained on, and no option allows the base's own code.
        base_sha256=None,
        allow_remote_code=False,
        digests=digests,
        device=arguments.device,
    )
    verify_and_name(paths, verify, withdraw=lambda _report: None)
    return {"verification": json.loads(paths.report.read_text(encoding="utf-8")), "verification_page": str(paths.page)}


def read_prompts(path: Path, tokenizer: Path) -> list[list[int]]:
    """Return token ids of the prompts in a file. tokenizer: directory of the tokenizer for text prompts. Raises ConfigError."""
    prompts: list[list[int]] = []
    texts = None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        ids = _ids(line)
        if ids is None:
            if texts is None:
                from transformers import AutoTokenizer

                try:
                    texts = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
                except (OSError, ValueError) as error:
                    raise ConfigError(
                        f"--prompts {path}, line {number} is text, and neither base nor adapter has a tokenizer: {error}",
                        "write JSON arrays of token ids",
                    ) from error
            ids = list(texts(line)["input_ids"])
        if ids:
            prompts.append(ids)
    if not prompts:
        raise ConfigError(f"--prompts {path} holds no prompt", "write one on each line")
    return prompts


def _ids(line: str) -> list[int] | None:
    """Return the token ids if the line is a JSON array of them; None if it is text."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    is_ids = isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    return value if is_ids else None


def _shard_bytes(text: str) -> int:
    try:
        return size_bytes(text)
    except ValueError as error:
        raise ConfigError(f"--max-shard-size {error}") from error


def _quantization(arguments: argparse.Namespace) -> Quantization | None:
    """Return how training quantized the base, or None if no option says that it did."""
    written = arguments.quantization
    if written is None and arguments.base_form is MergeBase.ORIGINAL:
        return None
    # Imported here because most merges need no plan.
    from finetune_job.api.method import QuantizationSpec
    from finetune_job.plan.choices import Choices
    from finetune_job.plan.resolve_model import quantization_plan

    try:
        spec = QuantizationSpec.model_validate_json(written or "{}")
    except ValueError as error:
        raise ConfigError(f"--quantization {written}: {error}", "write it as spec.method.quantization of a job") from error
    from finetune_trainer.merge.quantized_base import training_quantization
    from finetune_trainer.model.load import stored_dtype

    return training_quantization(quantization_plan(spec, Choices()), stored_dtype(arguments.base))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the merge and return the exit code."""
    arguments = parser().parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    try:
        report = run(arguments)
    except Exception as error:  # noqa: BLE001 - every failure has a class
        failure, hint = classify(error)
        print("\n".join(text for text in (str(error), hint) if text), file=sys.stderr, flush=True)
        return EXIT_CODES[failure]
    print(json.dumps({"report": report}), flush=True)
    return 0


if __name__ == "__main__":
    given = parser().parse_args()
    if given.parent is not None:
        die_with(given.parent)
    if given.quantization is None and given.base_form is MergeBase.ORIGINAL:
        keep_bitsandbytes_out()
    end(main())

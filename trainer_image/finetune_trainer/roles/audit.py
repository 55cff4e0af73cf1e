"""`python -m finetune_trainer.roles.audit`: the parts of a run, and comparisons of it with steps that were computed again.

It serves the command line, which waits for it: standard output is one line of JSON, or standard error is one message. Imports no
torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune_job.failures import EXIT_CODES
from finetune_trainer.checkpoint.compare import (
    ByteDifference,
    checkpoint_difference,
    merged_difference,
    results_difference,
)
from finetune_trainer.context import RunContext, add_run_arguments, run_context
from finetune_trainer.errors import classify
from finetune_trainer.files import MANIFEST_FILE, read_own
from finetune_trainer.inspection.audit import inspect_run
from finetune_trainer.processes.start import die_with, end, keep_torch_out
from finetune_trainer.release.checksums import parse_checksums
from finetune_trainer.release.files import release_layout
from finetune_trainer.weights.headers import read_json


def parser() -> argparse.ArgumentParser:
    """Build the parser of the arguments."""
    top = argparse.ArgumentParser(prog="python -m finetune_trainer.roles.audit", description=__doc__)
    top.add_argument("--parent", type=int, help="process with which this one ends")
    orders = top.add_subparsers(dest="order", required=True)
    look = orders.add_parser("look", help="the parts of a run")
    add_run_arguments(look)
    for name, what in (("checkpoints", "two checkpoints"), ("results", "two trained results")):
        compare = orders.add_parser(name, help=what)
        compare.add_argument("--expected", type=Path, required=True)
        compare.add_argument("--found", type=Path, required=True)
    merged = orders.add_parser("merged", help="the merged model of a run, and one that was made again")
    add_run_arguments(merged)
    merged.add_argument("--found", type=Path, required=True)
    return top


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compute the answer. Raises TrainerError, MergeError, OSError."""
    if arguments.order == "look":
        return inspect_run(_context(arguments)).document()
    if arguments.order == "checkpoints":
        return _answer(checkpoint_difference(arguments.expected, arguments.found))
    if arguments.order == "merged":
        context = _context(arguments)
        return _answer(merged_difference(context.output.merged, arguments.found, _merged_checksums(context)))
    names = sorted(read_json(arguments.found / MANIFEST_FILE)["files"])
    return _answer(results_difference(arguments.expected, arguments.found, names))


def _context(arguments: argparse.Namespace) -> RunContext:
    """The run's context. A run may have ended before preflight had written the base with its added tokens."""
    context = run_context(arguments)
    return context.with_trained_rows() if context.workspace.added_tokens.is_file() else context


def _merged_checksums(context: RunContext) -> dict[str, str]:
    """SHA-256 of the merged model's files, by their names in its directory, from the checksums of the results."""
    path, layout = context.output.checksums, release_layout(context.plan)
    listed = parse_checksums(read_own(path).decode(errors="replace")) if path.is_file() else None
    local = {layout.in_results(name): sha256 for name, sha256 in (listed or {}).items()}
    prefix = f"{context.output.merged.name}/"
    return {name.removeprefix(prefix): sha256 for name, sha256 in local.items() if name.startswith(prefix)}


def _answer(difference: ByteDifference | None) -> dict[str, Any]:
    return {"difference": None if difference is None else str(difference)}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the answer and return the exit code."""
    arguments = parser().parse_args(argv)
    if arguments.parent is not None:
        die_with(arguments.parent)
    try:
        answer = run(arguments)
    except Exception as error:  # noqa: BLE001 - every failure has a class
        failure, hint = classify(error)
        print("\n".join(text for text in (str(error), hint) if text), file=sys.stderr, flush=True)
        return EXIT_CODES[failure]
    print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    keep_torch_out()
    end(main())

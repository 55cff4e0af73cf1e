"""`python -m finetune_trainer.roles.audit`: lists the parts of a run, or compares it with steps that were computed again.

The command line starts it and waits: the answer is one line of JSON on standard output, or one message on standard error. It does
not import torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune_job.failures import EXIT_CODES
from finetune_trainer.checkpoint.compare import checkpoint_difference, results_difference
from finetune_trainer.context import add_run_arguments, run_context
from finetune_trainer.errors import classify
from finetune_trainer.files import MANIFEST_FILE
from finetune_trainer.inspection.audit import inspect_run
from finetune_trainer.processes.start import die_with, end, keep_torch_out
from finetune_trainer.weights.headers import read_json


def parser() -> argparse.ArgumentParser:
    """Build the parser of the arguments."""
    top = argparse.ArgumentParser(prog="python -m finetune_trainer.roles.audit", description=__doc__)
    top.add_argument("--parent", type=int, help="process with which this one ends")
    orders = top.add_subparsers(dest="order", required=True)
    look = orders.add_parser("look", help="the parts of a run")
    add_run_arguments(look)
    for name, what in (("checkpoints", "two checkpoints"), ("results", "two adapters or models")):
        compare = orders.add_parser(name, help=what)
        compare.add_argument("--expected", type=Path, required=True)
        compare.add_argument("--found", type=Path, required=True)
    return top


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compute the answer. Raises TrainerError, MergeError, OSError."""
    if arguments.order == "look":
        context = run_context(arguments)
        # A run may have ended before preflight wrote the base with added tokens.
        return inspect_run(context.with_trained_rows() if context.workspace.added_tokens.is_file() else context).document()
    if arguments.order == "checkpoints":
        return {"difference": checkpoint_difference(arguments.expected, arguments.found)}
    return {"difference": _difference_of_results(arguments.expected, arguments.found)}


def _difference_of_results(expected: Path, reproduced: Path) -> str | None:
    """Describe the first difference between two adapters (files in the export's manifest) or two merged models (all files)."""
    exported = read_json(reproduced / MANIFEST_FILE)["files"]
    if isinstance(exported, dict):
        return results_difference(expected, reproduced, sorted(exported))
    names = _files_below(reproduced)
    difference = results_difference(expected, reproduced, sorted(names - {MANIFEST_FILE}))
    # A file that was not reproduced counts as a difference: it may be code that libraries load together with the weights.
    others = sorted(_files_below(expected) - names)
    return difference or (f"{others[0]} was not reproduced" if others else None)


def _files_below(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


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

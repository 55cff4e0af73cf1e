"""`python -m finetune_trainer.preflight.model_process`: inspects the model that will be trained and merged.

torch and related libraries take hundreds of MB for as long as a process lives. So the process that prepares data, perhaps for an
hour and with worker processes, does not import them (processes/start.py). It starts this program, which ends once it has
answered. A malicious model may control this program, so its time, memory and answer are bounded.

Standard input: the plan. Standard output: structure and findings as JSON.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

from pydantic import TypeAdapter

from finetune_job.catalogue.book import make_finding
from finetune_job.failures import FailureClass
from finetune_job.finding import Finding
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.checkpoint.start import start_directory
from finetune_trainer.context import RunContext
from finetune_trainer.errors import TrainerError
from finetune_trainer.inspection.report import ModelStructure
from finetune_trainer.processes.child import Child, ChildEnd, encode_answer, parse_answer, start_answering, wait_for_answer
from finetune_trainer.processes.sandbox import WALL_SECONDS, how_it_ended, limit_this_process
from finetune_trainer.processes.start import (
    NO_ADVICE,
    answer_on_stdout,
    die_with,
    end,
    keep_bitsandbytes_out,
    preload,
    torch_is_here,
)

Checked = tuple[ModelStructure | None, list[Finding]]
_CHECKED: TypeAdapter[Checked] = TypeAdapter(Checked)
ANSWER_BYTES = 32 << 20
"""Largest size of an answer. A structure of 100,000 trained tensors takes some 20 MB."""
LONG_WORK_SECONDS = 24 * 3600.0
"""Time limit of work that reads all weights, such as decomposing them. Preflight refuses a job if an hour would not suffice."""


class ModelCheckError(TrainerError):
    """A process that works on the model failed."""


class ModelCheckKilledError(ModelCheckError):
    """The process was killed by SIGKILL, which the kernel sends when memory runs out."""

    failure = FailureClass.HOST_OUT_OF_MEMORY


def check_model(plan: RunPlan, directory: Path) -> Checked:
    """Returns the structure (None if it cannot be built) and all findings, including the merge's. Reads few weights."""
    from finetune_trainer.preflight.model_checks import inspect_model

    seen = inspect_model(plan, directory)
    return seen.structure, seen.findings


def start_check(plan: RunPlan, directory: Path) -> Child:
    """Starts `check_model` in a separate process, whose answer `finish_check` returns."""
    # Use one thread, because small operations on several threads wait for the slowest.
    variables = {"OMP_NUM_THREADS": "1"}
    return start_module(__spec__.name, plan.model_dump_json(), "--model", str(directory), variables=variables)


def finish_check(child: Child, directory: Path) -> Checked:
    """Waits for the answer of the process. Raises ModelCheckError if the process fails."""
    ended = wait_for_answer(child, WALL_SECONDS)
    if ended.exceeded is not None or ended.code == -signal.SIGXCPU:
        finding = make_finding(
            "model-not-accepted",
            field="spec.model.source",
            value=directory.name,
            message=f"building the model that config.json describes, with what the method adds to it, {how_it_ended(ended)}",
            fix="check the numbers in config.json, those of layers and experts first, against the original model's, and "
            "simplify the regular expressions in the settings of the method, if there are any",
        )
        return None, [finding]
    _require_success(ended, "checks the model", "its log says why")
    try:
        return parse_answer(ended.answer, _CHECKED)
    except ValueError as error:
        raise ModelCheckError(
            "the process that checks the model answered with something other than a structure", "its log says why"
        ) from error


def computed_first_values(context: RunContext) -> str:
    """Returns the digest of the file of first values, which a separate process computes if this process has not imported torch.

    Raises ModelCheckError, and OSError if the file system fails.
    """
    path, start = context.workspace.first_values, start_directory(context)
    path.parent.mkdir(parents=True, exist_ok=True)
    if torch_is_here():
        from finetune_trainer.model.first_values import ensure_first_values

        return ensure_first_values(context.plan, context.base_model, path, start)
    # An earlier check has estimated the time, and the pod's deadlines also apply, so none is set here.
    arguments = ("--model", str(context.base_model), "--to", str(path), *([] if start is None else ["--start", str(start)]))
    child = start_module("finetune_trainer.model.first_values", context.plan.model_dump_json(), *arguments)
    what, fix = "decomposes the base's weights", "its log says why; to avoid it, remove spec.method.lora.initLoraWeights"
    return answer_of(child, what, fix).decode()


def start_module(
    name: str, given: str, *arguments: str, variables: dict[str, str] | None = None, max_answer_bytes: int = ANSWER_BYTES
) -> Child:
    """Starts a module that needs torch as a program that ends with this process. given: the program's standard input."""
    command = [sys.executable, "-m", name, "--parent", str(os.getpid()), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != NO_ADVICE} | (variables or {})
    return start_answering(command, environment, given.encode(), max_answer_bytes)


def answer_of(child: Child, what: str, fix: str) -> bytes:
    """Returns the answer of a process. Raises ModelCheckError if it fails. what: its task, as in "checks the model"."""
    ended = wait_for_answer(child, LONG_WORK_SECONDS)
    _require_success(ended, what, fix)
    return ended.answer


def _require_success(ended: ChildEnd, what: str, fix: str) -> None:
    if ended.code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        raise ModelCheckKilledError(
            f"the process that {what} was killed (SIGKILL), most likely because memory ran out",
            "raise the memory of the profile's resources.preflight",
        )
    if ended.code != 0:
        raise ModelCheckError(f"the process that {what} exited with status {ended.code}", fix)


def main() -> int:
    """Writes the result of `check_model` to standard output, within limits of time and memory."""
    parser = argparse.ArgumentParser(prog="python -m finetune_trainer.preflight.model_process", description=__doc__)
    parser.add_argument("--parent", type=int, required=True, help="process with which this one ends")
    parser.add_argument("--model", type=Path, required=True, help="directory of the base model")
    arguments = parser.parse_args()
    die_with(arguments.parent)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s", stream=sys.stderr)
    with answer_on_stdout() as answer:
        plan = RunPlan.model_validate_json(sys.stdin.buffer.read())
        keep_bitsandbytes_out(plan)
        preload("finetune_trainer.preflight.model_checks")
        limit_this_process()
        answer.write(encode_answer(_CHECKED.dump_python(check_model(plan, arguments.model), mode="json")))
    return 0


if __name__ == "__main__":
    end(main())

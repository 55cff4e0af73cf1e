"""Inspects the model that will be trained and merged in a separate process, and reports what is known if that process failed.

torch and the libraries around it take hundreds of MB for as long as a process lives, so the process that prepares the data,
perhaps for an hour and with workers next to it, does without them (processes/start.py). The separate process is a fork of one
that has imported them (roles/rehearse.py).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from finetune_job.catalogue.book import make_finding
from finetune_job.failures import FailureClass
from finetune_job.finding import Finding
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.context import RunContext
from finetune_trainer.errors import TrainerError
from finetune_trainer.inspection.report import ModelStructure
from finetune_trainer.processes.child import Child, ChildEnd, encode_answer, parse_answer, start_answering, wait_for_answer
from finetune_trainer.processes.sandbox import how_it_ended, limit_this_process
from finetune_trainer.processes.start import NO_ADVICE, torch_is_here

Checked = tuple[ModelStructure | None, list[Finding]]
ANSWER: TypeAdapter[Checked] = TypeAdapter(Checked)
ANSWER_BYTES = 32 << 20
"""The most bytes of an answer; a structure of 100,000 trained tensors takes some 20 MB."""


LONG_WORK_SECONDS = 24 * 3600.0
"""Time limit of work that reads all weights, such as the first values of all layers; preflight refuses more than an hour."""


class ModelCheckError(TrainerError):
    """The process that inspects the model ended too early."""


class ModelCheckKilledError(ModelCheckError):
    """The process was killed by SIGKILL, which the kernel sends if memory runs out."""

    failure = FailureClass.HOST_OUT_OF_MEMORY


def check_model(plan: RunPlan, directory: Path) -> Checked:
    """Returns the structure, or None if it cannot be built, and all findings, including the merge's. Reads headers only."""
    from finetune_trainer.preflight.model_checks import inspect_model

    seen = inspect_model(plan, directory)
    return seen.structure, seen.findings


def computed_first_values(context: RunContext) -> str:
    """Returns the digest of the file of first values, computed in a separate process if this one does without torch.

    Raises ModelCheckError, and OSError as the file system does.
    """
    path = context.workspace.first_values
    path.parent.mkdir(parents=True, exist_ok=True)
    if torch_is_here():
        from finetune_trainer.model.first_values import ensure_first_values

        return ensure_first_values(context.plan, context.base_model, path)
    arguments = ["--model", str(context.base_model), "--to", str(path)]
    # An earlier check has estimated the time; the pod's deadlines apply as well.
    work = ModuleWork("finetune_trainer.model.first_values", arguments, context.plan.model_dump_json().encode())
    what, fix = "decomposes the base's weights", "its log says why; remove spec.method.lora.initLoraWeights to do without"
    return answer_of(work.start(), what, fix).decode()


@dataclass(frozen=True)
class ModuleWork:
    """A module that needs torch, to be run as a program that ends with this process."""

    name: str
    arguments: Sequence[str]
    given: bytes
    """The standard input."""

    def start(self) -> Child:
        command = [sys.executable, "-m", self.name, "--parent", str(os.getpid()), *self.arguments]
        environment = {name: value for name, value in os.environ.items() if name != NO_ADVICE}
        return start_answering(command, environment, self.given, ANSWER_BYTES)


def answer_of(child: Child, what: str, fix: str) -> bytes:
    """Returns the answer of a process that `what`. Raises ModelCheckError if the process fails."""
    ended = wait_for_answer(child, LONG_WORK_SECONDS)
    if ended.code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        raise ModelCheckKilledError(
            f"the process that {what} was killed (SIGKILL), most likely because memory ran out",
            "raise the memory of the profile's resources.preflight",
        )
    if ended.code != 0:
        raise ModelCheckError(f"the process that {what} ended with status {ended.code}", fix)
    return ended.answer


def check_within_bounds(plan: RunPlan, directory: Path) -> bytes:
    """Encodes the answer of `check_model`, in a process that does nothing else: limits its time and memory from here on."""
    limit_this_process()
    return encode_answer(ANSWER.dump_python(check_model(plan, directory), mode="json"))


def checked(ended: ChildEnd, directory: Path) -> Checked:
    """Returns the answer of such a process about the model in `directory`. Raises ModelCheckError if there is none."""
    if ended.exceeded is not None or ended.code == -signal.SIGXCPU:
        return None, [_endless(directory, how_it_ended(ended))]
    if ended.code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        raise ModelCheckKilledError(
            "the process that checks the model was killed (SIGKILL), most likely because memory ran out",
            "raise the memory of the profile's resources.preflight",
        )
    if ended.code != 0:
        raise ModelCheckError(f"the process that checks the model ended with status {ended.code}", "its log says why")
    try:
        return parse_answer(ended.answer, ANSWER)
    except ValueError as error:
        raise ModelCheckError(
            "the process that checks the model answered with something else than a structure", "its log says why"
        ) from error


def _endless(directory: Path, reason: str) -> Finding:
    return make_finding(
        "model-not-accepted",
        field="spec.model.source",
        value=directory.name,
        message=f"building the model that config.json describes, with what the method adds to it, {reason}",
        fix="check the numbers in config.json, those of layers and experts first, against the original model's, and write "
        "simpler regular expressions where the settings of the method hold any",
    )

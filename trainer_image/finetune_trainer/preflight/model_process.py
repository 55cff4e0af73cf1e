"""What will be trained and merged, found out in a process of its own, and what is known of a model where that process failed.

torch and the libraries around it take hundreds of MB for as long as a process lives, so the one that prepares the data, perhaps
for an hour and with workers next to it, does without them (processes/start.py). The process is a fork of one that has imported
them (roles/rehearse.py).
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
"""A structure of 100,000 trained tensors takes some 20 MB."""


LONG_WORK_SECONDS = 24 * 3600.0
"""For what reads all weights, such as the first values of all layers, of which preflight refuses more than an hour."""


class ModelCheckError(TrainerError):
    """The process that looks at the model ended before it had looked."""


class ModelCheckKilledError(ModelCheckError):
    """By SIGKILL, which is what the kernel does where memory runs out."""

    failure = FailureClass.HOST_OUT_OF_MEMORY


def check_model(plan: RunPlan, directory: Path) -> Checked:
    """The structure, or None where it cannot be built, and every finding, of the merge too. Reads headers only."""
    from finetune_trainer.preflight.model_checks import inspect_model

    seen = inspect_model(plan, directory)
    return seen.structure, seen.findings


def computed_first_values(context: RunContext) -> str:
    """Digest of the file of first values, in a process of its own where this one does without torch.

    Raises ModelCheckError, and OSError as the file system does.
    """
    path = context.workspace.first_values
    path.parent.mkdir(parents=True, exist_ok=True)
    if torch_is_here():
        from finetune_trainer.model.first_values import ensure_first_values

        return ensure_first_values(context.plan, context.base_model, path)
    arguments = ["--model", str(context.base_model), "--to", str(path)]
    # How long it takes was looked at before; the pod's deadlines hold besides.
    work = ModuleWork("finetune_trainer.model.first_values", arguments, context.plan.model_dump_json().encode())
    what, fix = "decomposes the base's weights", "its log says why; remove spec.method.lora.initLoraWeights to do without"
    return answer_of(work.start(), what, fix).decode()


@dataclass(frozen=True)
class ModuleWork:
    """A module with torch to be run as a program that dies with this process."""

    name: str
    arguments: Sequence[str]
    given: bytes
    """Its standard input."""

    def start(self) -> Child:
        command = [sys.executable, "-m", self.name, "--parent", str(os.getpid()), *self.arguments]
        environment = {name: value for name, value in os.environ.items() if name != NO_ADVICE}
        return start_answering(command, environment, self.given, ANSWER_BYTES)


def answer_of(child: Child, what: str, fix: str) -> bytes:
    """What a process says that `what`. Raises ModelCheckError if it does not come to its end."""
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
    """`check_model` as an answer, of a process that lives for nothing else: its time and memory are bounded from here on."""
    limit_this_process()
    return encode_answer(ANSWER.dump_python(check_model(plan, directory), mode="json"))


def checked(ended: ChildEnd, directory: Path) -> Checked:
    """What such a process says of the model in `directory`. Raises ModelCheckError if it says nothing."""
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

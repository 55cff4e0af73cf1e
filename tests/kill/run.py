"""One run that is killed until it is done, and the comparison with the run that nobody touched."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file

from finetune_job.api.training import GradientReduction
from finetune_job.failures import EXIT_CODES, MOST_RESTARTS_IN_POD, FailureClass
from finetune_trainer.checkpoint.manifest import MANIFEST
from finetune_trainer.checkpoint.retention import checkpoint_directories
from finetune_trainer.context import RunContext
from finetune_trainer.processes.start import name_of_process
from finetune_trainer.ranks.reports import rank_process_name
from tests.kill.base import base_bytes, make_base, make_base_with_kills
from tests.kill.cases import Case
from tests.kill.moments import BASE, STARTUP, OutputTo, random_moment
from tests.starts import train_arguments
from tests.support.forked_ranks import run_gang, trained_files

MOST_KILLS = 3
MOST_ATTEMPTS = 12
DEADLINE_SECONDS = 240.0
_RANK = rank_process_name(0).rstrip("0")
_PREEMPTED = EXIT_CODES[FailureClass.PREEMPTED]


@dataclass(frozen=True)
class Undisturbed:
    """What a run must end with."""

    case: Case
    claims: Path
    context: RunContext
    result: dict[str, bytes]
    seconds: float
    """Of its attempt."""


@dataclass
class Outcome:
    """How a disturbed run ended."""

    case: str
    is_real: bool
    """Trained by the role of a pod, with torchrun."""
    signal: str
    problem: str = ""
    """Empty where every byte was as in the undisturbed run."""
    landed: Counter[str] = field(default_factory=Counter)
    """Signals by the stage in which the first rank was hit."""
    story: list[str] = field(default_factory=list)


def undisturbed(case: Case, directory: Path) -> Undisturbed:
    """Prepare the claims of a case, keep a copy, and train without disturbance."""
    claims = directory / "claims"
    case.context(claims)
    context = case.context(_copied(claims, directory / "undisturbed"))
    if case.adds_tokens:
        if code := make_base(context, directory):
            raise RuntimeError(f"{case.name}: the base with added tokens was not written: {code}")
        context = context.with_trained_rows()
    start = time.monotonic()
    codes = run_gang(context, [OutputTo(directory)])
    if any(codes):
        raise RuntimeError(f"{case.name}: the undisturbed run ended with {codes}")
    return Undisturbed(case, claims, context, final_bytes(context), time.monotonic() - start)


def disturbed(base: Undisturbed, directory: Path, random: Random, *, deadly: bool, is_real: bool) -> Outcome:
    """Train with disturbances until the run is done. is_real: the role of a pod is started; else ranks alone."""
    outcome = Outcome(base.case.name, is_real, "SIGKILL" if deadly else "SIGTERM")
    context = replace(base.context, claims_root=_copied(base.claims, directory / "claims"))
    landed = directory / "landed"
    landed.mkdir()
    claims = base.claims
    if base.case.adds_tokens:
        wanted_base = base_bytes(base.context)
        outcome.landed[BASE], outcome.story, outcome.problem = make_base_with_kills(
            context, wanted_base, directory, random, deadly=deadly, most_kills=MOST_KILLS
        )
        if outcome.problem:
            return outcome
        claims = _copied(context.claims_root, directory / "claims-with-base")
    wanted = random.randint(1, MOST_KILLS)
    is_done = False
    for attempt in range(MOST_ATTEMPTS):
        context = replace(context, attempt=attempt)
        hits = _hits_of_training(outcome)
        if is_real:
            is_done = _real_attempt(context, base, random, outcome, deadly=deadly, is_disturbed=hits < min(wanted, 2))
        else:
            is_done = _forked_attempt(context, base, random, outcome, landed, deadly=deadly, is_disturbed=hits < wanted)
        if is_done and not _hits_of_training(outcome):
            # It was faster than what was to hit it, and would prove nothing.
            shutil.rmtree(context.claims_root)
            _copied(claims, context.claims_root)
            is_done = False
        elif is_done or outcome.problem:
            break
    if not outcome.problem:
        outcome.problem = (
            _difference(final_bytes(context), base.result) if is_done else f"not done after {MOST_ATTEMPTS} attempts"
        )
    if not outcome.problem:
        shutil.rmtree(directory)
    return outcome


def _hits_of_training(outcome: Outcome) -> int:
    return outcome.landed.total() - outcome.landed[BASE]


def _forked_attempt(
    context: RunContext, base: Undisturbed, random: Random, outcome: Outcome, landed: Path, *, deadly: bool, is_disturbed: bool
) -> bool:
    moments = []
    if is_disturbed:
        moments = [random_moment(random, context.attempt, landed, deadly=deadly, usual_seconds=base.seconds)]
    ranks = random.choice(base.case.sizes) if base.case.sizes else None
    codes = run_gang(context, [OutputTo(landed.parent), *moments], world_size=ranks)
    hit = sorted(landed.glob(f"{context.attempt}-*"))
    if hit:
        outcome.landed[hit[0].read_text() or STARTUP] += 1
    outcome.story.append(
        f"attempt {context.attempt}: {moments[0] if moments else 'undisturbed'}; {len(codes)} ranks ended with {codes}"
    )
    if codes == [0] * len(codes):
        return True
    if not hit or not _is_answered(codes, deadly=deadly, is_starting=hit[0].read_text() == STARTUP):
        outcome.problem = f"ranks ended with {codes}"
    return False


def _is_answered(codes: list[int], *, deadly: bool, is_starting: bool) -> bool:
    """Whether ranks ended as they should after a signal; before they have joined each other SIGTERM ends them at once."""
    if deadly:
        return -signal.SIGKILL in codes
    return set(codes) <= {0, _PREEMPTED} or (is_starting and -signal.SIGTERM in codes)


def _real_attempt(
    context: RunContext, base: Undisturbed, random: Random, outcome: Outcome, *, deadly: bool, is_disturbed: bool
) -> bool:
    """`python -m finetune_trainer train`, its ranks killed by their process ids, or the pod's first process told to end."""
    sizes = base.case.sizes
    ranks = random.choice(sizes) if sizes else context.plan.parallelism.world_size
    # Every other attempt may start its ranks again in the pod.
    restarts = MOST_RESTARTS_IN_POD if context.attempt % 2 else 0
    arguments = map(str, [*train_arguments(context), "--restarts", restarts, *(["--ranks", ranks] if sizes else [])])
    with context.workspace.root.joinpath("said").open("ab") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "finetune_trainer", *arguments], stdout=said, stderr=said, start_new_session=True
        )
    try:
        told = "undisturbed"
        if is_disturbed:
            # Sooner after each try that came too late: the first undisturbed run of all also waited for the libraries.
            told = _strike(process, ranks, random, most_seconds=base.seconds / (context.attempt + 1), deadly=deadly)
            if told:
                outcome.landed["torchrun"] += 1
        code = process.wait(DEADLINE_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        # A pod's other processes end with its first one; here ranks could outlive it.
        _kill(_ranks(process.pid))
    outcome.story.append(f"attempt {context.attempt}: {told or 'ended before it was hit'}; the pod ended with {code}")
    if code != 0 and not is_disturbed:
        outcome.problem = f"the pod ended with {code}, see {context.workspace.logs('train', context.attempt)}"
    return code == 0


def _strike(process: subprocess.Popen[bytes], num_ranks: int, random: Random, *, most_seconds: float, deadly: bool) -> str:
    """Wait until all ranks run, then for a random time; what was done, empty if the pod had ended."""
    pause = threading.Event()
    deadline = time.monotonic() + DEADLINE_SECONDS
    while len(_ranks(process.pid)) < num_ranks and process.poll() is None and time.monotonic() < deadline:
        pause.wait(0.05)
    pause.wait(random.uniform(0, most_seconds))
    ranks = _ranks(process.pid)
    if process.poll() is not None or not ranks:
        return ""
    if not deadly:
        process.send_signal(signal.SIGTERM)
        return "SIGTERM to the supervisor"
    victims = random.choice(([ranks[0]], [ranks[-1]], ranks))
    _kill(victims)
    if victims is ranks:
        process.send_signal(signal.SIGKILL)
    return f"SIGKILL to {len(victims)} of {len(ranks)} ranks"


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        # One that was ending may have been waited for since it was found.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _ranks(pod: int) -> list[int]:
    """Process ids of the ranks of this pod, whose first process leads their session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and name_of_process(int(entry.name)).startswith(_RANK):
            try:
                state, _, _, session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if session == str(pod) and state != "Z":
                found.append(int(entry.name))
    return sorted(found)


def final_bytes(context: RunContext) -> dict[str, bytes]:
    """All that a run leaves: the exported files, parameters and optimizer state of its last checkpoint, and a base of its own."""
    newest = checkpoint_directories(context.workspace.checkpoints)[0]
    found = {**trained_files(context), **(base_bytes(context) if context.plan.model.added_tokens else {})}
    if context.plan.training.reduction is GradientReduction.ORDERED:
        # Each number of ranks writes other files of the same values.
        return {**found, **_values(newest)}
    return {**found, **{f"{newest.name}/{path.name}": path.read_bytes() for path in sorted(newest.glob("rank-*"))}}


def _values(checkpoint: Path) -> dict[str, bytes]:
    """Each tensor of a checkpoint, put together from what its ranks wrote."""
    parts: dict[str, list[tuple[int, bytes]]] = {}
    manifest = json.loads((checkpoint / MANIFEST).read_bytes())
    for file in manifest["files"]:
        starts = {piece["name"]: piece["start"] for piece in file["pieces"]}
        for key, tensor in load_file(checkpoint / file["name"]).items():
            parts.setdefault(key, []).append((starts[key.partition("/")[2]], tensor.view(torch.uint8).numpy().tobytes()))
    return {key: b"".join(values for _, values in sorted(found)) for key, found in parts.items()}


def _difference(found: dict[str, bytes], expected: dict[str, bytes]) -> str:
    if set(found) != set(expected):
        return f"other files: {sorted(set(found) ^ set(expected))}"
    return ", ".join(f"{name} differs" for name in expected if found[name] != expected[name])


def _copied(claims: Path, target: Path) -> Path:
    shutil.copytree(claims, target)
    return target

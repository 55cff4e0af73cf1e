"""The directory of a job's local runs: plan, record, links to claims, termination messages and output of the roles.

The record passes the state of one command to the next. It is kept next to its plan, and replaced as a whole.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from pydantic import BaseModel, ConfigDict

from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_job.api.status import Restarts
from finetune_job.layout import OutputLayout
from finetune_job.names import Role
from finetune_job.plan.digest import canonical_json, text_sha256
from finetune_job.plan.run_plan import JobIdentity, RunPlan


@dataclass(frozen=True)
class RunDirectory:
    """Directory of one job's local runs."""

    root: Path

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def is_there(self) -> bool:
        """Whether a run has begun in the directory; also False if no file can have the name, for example a very long one."""
        return os.path.isfile(self.plan)  # noqa: PTH113 - is_file() of Path raises

    @property
    def record(self) -> Path:
        return self.root / "record.json"

    @property
    def lock(self) -> Path:
        """Lock file, held by the command that works on the job and by the processes that it has started."""
        return self.root / "lock"

    @property
    def claims(self) -> Path:
        """Directory with a link for each claim, in place of the mounts of pods."""
        return self.root / "claims"

    def termination_log(self, role: str, attempt: int) -> Path:
        return self.root / f"{role}-{attempt}.termination.json"

    def output(self, role: str, attempt: int) -> Path:
        return self.root / f"{role}-{attempt}.log"


def run_directory_of(claims: Path, job: JobIdentity, purpose: str = "") -> RunDirectory:
    """Return a job's directory, next to the claims, whose names never start with a dot. `purpose`: a command other than `run`."""
    # No name of a job has an underscore, so no other job has this directory.
    suffix = f"_{purpose}" if purpose else ""
    return RunDirectory(claims.absolute() / ".finetune" / f"{job.namespace}.{job.name}{suffix}")


LOOK_SECONDS = 1.0
"""Longest time for which `holder_of` in another command holds the lock."""


@contextmanager
def locked(place: RunDirectory) -> Iterator[int]:
    """Lock the job against other commands. Yields the descriptor of the lock, for processes that must keep it.

    Raises LocalError if another command, or a process that it left behind, holds the lock.
    """
    place.root.mkdir(parents=True, exist_ok=True)
    with place.lock.open("a+") as lock:
        deadline = time.monotonic() + LOOK_SECONDS
        while not _take(lock):
            if _named_in(place).pid or time.monotonic() > deadline:
                raise LocalError(f"{place.root.name}: {_held_text(place)}", ExitCode.FAILED)
            time.sleep(0.05)
        lock.truncate(0)
        lock.write(Holder(pid=os.getpid(), since=datetime.now(UTC)).model_dump_json())
        lock.flush()
        yield lock.fileno()


def _take(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Holder(BaseModel):
    """The command that works on a job, as recorded in the lock file."""

    model_config = ConfigDict(extra="ignore")
    pid: int
    since: datetime


def holder_of(place: RunDirectory) -> Holder | None:
    """Return the command that works on the job now, or None. Its pid is 0 if only processes that it had started are left."""
    try:
        with place.lock.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return _named_in(place)
    return None


def _named_in(place: RunDirectory) -> Holder:
    try:
        holder = Holder.model_validate_json(place.lock.read_text())
    except (OSError, ValueError):
        return Holder(pid=0, since=datetime.fromtimestamp(0, UTC))
    # If that command was killed, another process may have its process ID by now.
    with suppress(OSError):
        files = Path(f"/proc/{holder.pid}/fd").iterdir()
        if any(opened.exists() and opened.samefile(place.lock) for opened in files):
            return holder
    return holder.model_copy(update={"pid": 0})


def _held_text(place: RunDirectory) -> str:
    """Say which command works on the job, since when and on what, and what to do."""
    holder, record = _named_in(place), read_record(place.record)
    stage = None if record is None else record.stage
    if holder.pid == 0:
        return "a run of this job was killed, and its processes are still saving their state; try again in a minute"
    return (
        f"process {holder.pid} has been working on this job since {holder.since:%Y-%m-%d %H:%M:%S} UTC"
        f"{f' ({stage})' if stage else ''}; see `finetune status`, stop it with `finetune stop`, or give the job another name"
    )


def start_fresh(place: RunDirectory) -> None:
    """Remove what an earlier run of this job left: its workspace, and the results that it wrote according to its record.

    Raises LocalError if the run's plan, which says where workspace and results are, is damaged.
    """
    record = read_record(place.record)
    if record is not None and place.plan.exists():
        before = read_plan(place)
        if before is None:
            raise LocalError(
                f"{place.plan} cannot be read, so it is not known where the last run has its workspace and results; remove them "
                f"and {place.root}, or run without --fresh",
                ExitCode.FAILED,
            )
        output = OutputLayout((place.claims / before.output.claim).resolve() / before.output.path)
        workspace = (place.claims / before.workspace.claim).resolve() / before.workspace.path
        merged = output.merged_paths()
        for directory in (output.adapter, merged.verified, merged.unverified, merged.quarantined, workspace):
            shutil.rmtree(directory, ignore_errors=True)
        if Role.MERGE in record.next_attempt:
            # A run that never merged wrote none of these files: a README.md there belongs to the user.
            reports = (output.verification, output.verification_page, output.report, output.report_data)
            for file in (*reports, output.provenance, output.model_card, output.checksums):
                file.unlink(missing_ok=True)
    for file in place.root.glob("*.*"):
        if file.is_file():
            file.unlink()


def freeze(place: RunDirectory, plan: RunPlan) -> RunRecord:
    """Write the plan, and return the record to continue from. Raises LocalError if an earlier run froze another plan."""
    text = canonical_json(plan)
    sha256 = text_sha256(text)
    record = read_record(place.record)
    if record is not None and record.plan_sha256 != sha256:
        before = read_plan(place)
        names = [] if before is None else [name for name in RunPlan.model_fields if getattr(before, name) != getattr(plan, name)]
        changed = ", ".join(names) or "its settings"
        raise LocalError(
            f"{plan.job.name}: the manifest has changed since its last run ({changed}), and a run keeps its first plan; "
            "run with --fresh to start over, or give the job another name"
        )
    _replace(place.plan, text)
    return record or RunRecord(plan_sha256=sha256)


def read_plan(place: RunDirectory) -> RunPlan | None:
    """Return the frozen plan, or None if it does not exist or cannot be read."""
    try:
        return RunPlan.model_validate_json(place.plan.read_bytes())
    except (OSError, ValueError):
        return None


def begun_with(place: RunDirectory, plan: RunPlan) -> RunPlan | None:
    """Return the plan with which a run began, if `plan` differs at most in its choices: a later release may list more."""
    frozen = read_plan(place)
    return frozen if frozen is not None and frozen.model_copy(update={"choices": plan.choices}) == plan else None


class RunRecord(BaseModel):
    """State of a local run."""

    model_config = ConfigDict(extra="ignore")
    plan_sha256: str
    finished: list[Role] = []
    """Roles that succeeded, in order."""
    next_attempt: dict[Role, int] = {}
    """Number of the next attempt of each role."""
    restarts: dict[Role, Restarts] = {}
    """Restarts of each role; each has its own budget."""
    seconds: dict[Role, float] = {}
    """Time that each role has taken over all its attempts."""
    facts: dict[Role, dict[str, str]] = {}
    """Facts that each role reported when it succeeded."""

    @property
    def stage(self) -> Role | None:
        """The last role to have begun that has not succeeded yet."""
        return next((role for role in reversed(list(self.next_attempt)) if role not in self.finished), None)


def read_record(path: Path) -> RunRecord | None:
    """Return the record, or None if it does not exist or cannot be read."""
    try:
        return RunRecord.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None


def write_record(path: Path, record: RunRecord) -> None:
    """Replace the record."""
    _replace(path, record.model_dump_json(indent=2))


def _replace(path: Path, text: str) -> None:
    """Replace a file durably: readers see the old text or the new text, even after a power cut."""
    fresh = path.with_suffix(".new")
    with fresh.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)

"""The directory of a job's local runs: plan, record, links to claims, termination messages and output of the roles.

The record is what is known between two commands: kept with its plan, replaced as a whole.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from pydantic import BaseModel, ConfigDict, field_validator

from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_job.api.base import ClaimPath
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
        """Whether a run has begun in it; also for what is no name of a file, such as a text that is too long."""
        return os.path.isfile(self.plan)  # noqa: PTH113 - that of Path raises

    @property
    def record(self) -> Path:
        return self.root / "record.json"

    @property
    def lock(self) -> Path:
        """Held by the command that works on the job, and by what it has started."""
        return self.root / "lock"

    @property
    def claims(self) -> Path:
        """A link for each claim, as pods have mounts."""
        return self.root / "claims"

    def termination_log(self, role: str, attempt: int) -> Path:
        return self.root / f"{role}-{attempt}.termination.json"

    def output(self, role: str, attempt: int) -> Path:
        return self.root / f"{role}-{attempt}.log"


def run_directory_of(claims: Path, job: JobIdentity, purpose: str = "") -> RunDirectory:
    """Next to the claims; no claim has a name that starts with a dot. `purpose`: of another command than `finetune run`."""
    # No name of a job has an underscore.
    suffix = f"_{purpose}" if purpose else ""
    return RunDirectory(claims.absolute() / ".finetune" / f"{job.namespace}.{job.name}{suffix}")


LOOK_SECONDS = 1.0
"""`holder_of` of another command holds the lock for less."""


@contextmanager
def locked(place: RunDirectory) -> Iterator[int]:
    """Keep other commands from this job while one runs; the descriptor of the lock, for processes that must keep it.

    Raises LocalError if another command, or a process that it left behind, holds the job.
    """
    place.root.mkdir(parents=True, exist_ok=True)
    with place.lock.open("a+") as lock:
        deadline = time.monotonic() + LOOK_SECONDS
        while not _take(lock):
            if _named_in(place).pid or time.monotonic() > deadline:
                raise LocalError(f"{place.root.name}: {held_text(place)}", ExitCode.FAILED)
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
    """The command that works on a job, as it says in the lock."""

    model_config = ConfigDict(extra="ignore")
    pid: int
    since: datetime


def holder_of(place: RunDirectory) -> Holder | None:
    """The command that works on the job now; None: no command. The pid is 0 if only processes that it had started are left."""
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
    # Of a command that was killed the number may by now be another process's.
    return holder if _has_open(holder.pid, place.lock) else holder.model_copy(update={"pid": 0})


def _has_open(pid: int, path: Path) -> bool:
    try:
        return any(opened.exists() and opened.samefile(path) for opened in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def held_text(place: RunDirectory) -> str:
    """Say which command works on the job, since when and on what, and what to do."""
    holder, record = _named_in(place), read_record(place.record)
    stage = None if record is None else record.stage
    if holder.pid == 0:
        return "a run of this job was ended from outside, and what it had started is saving its state; try again in a minute"
    return (
        f"process {holder.pid} works on this job since {holder.since:%Y-%m-%d %H:%M:%S} UTC{f' ({stage})' if stage else ''}; see "
        "`finetune status`, end it with `finetune stop`, or give the job another name"
    )


def start_fresh(place: RunDirectory) -> None:
    """Remove what an earlier run of this job left: its workspace, and its results where its record proves them.

    Raises LocalError if its plan, which says where they are, is damaged.
    """
    record = read_record(place.record)
    if record is not None and place.plan.exists():
        before = read_plan(place)
        if before is None:
            raise LocalError(
                f"{place.plan}: cannot be read, so where the last run has its workspace and results is not known; remove them "
                f"and {place.root}, or run without --fresh",
                ExitCode.FAILED,
            )
        output = OutputLayout(_path(place, before.output))
        workspace = _path(place, before.workspace)
        merged = output.merged_paths()
        for directory in (output.adapter, merged.verified, merged.unverified, merged.quarantined, workspace):
            shutil.rmtree(directory, ignore_errors=True)
        if Role.MERGE in record.next_attempt:
            # A run that never came to its merge wrote none of these; a README.md that stands there is the user's own.
            reports = (output.verification, output.verification_page, output.report, output.report_data)
            for file in (*reports, output.provenance, output.model_card, output.checksums):
                file.unlink(missing_ok=True)
    for file in place.root.glob("*.*"):
        if file.is_file():
            file.unlink()


def _path(place: RunDirectory, location: ClaimPath) -> Path:
    return (place.claims / location.claim).resolve() / location.path


def freeze(place: RunDirectory, plan: RunPlan) -> RunRecord:
    """Write the plan, or find that an earlier run has frozen the same one; the record to continue from. Raises LocalError."""
    text = canonical_json(plan)
    sha256 = text_sha256(text)
    record = read_record(place.record)
    if record is not None and record.plan_sha256 != sha256:
        changed = ", ".join(_differences(place, plan)) or "its settings"
        raise LocalError(
            f"{plan.job.name}: the manifest has changed since its last run ({changed}), and a run keeps its first plan; "
            "run with --fresh to start over, or give the job another name"
        )
    _replace(place.plan, text)
    return record or RunRecord(plan_sha256=sha256)


def read_plan(place: RunDirectory) -> RunPlan | None:
    """The frozen plan, or None if there is none or it cannot be read."""
    try:
        return RunPlan.model_validate_json(place.plan.read_bytes())
    except (OSError, ValueError):
        return None


def begun_with(place: RunDirectory, plan: RunPlan) -> RunPlan | None:
    """The plan that a run has begun with, if `plan` says the same; a later release may only tell of more choices."""
    frozen = read_plan(place)
    return frozen if frozen is not None and frozen.model_copy(update={"choices": plan.choices}) == plan else None


def _differences(place: RunDirectory, plan: RunPlan) -> list[str]:
    before = read_plan(place)
    if before is None:
        return []
    return [name for name in RunPlan.model_fields if getattr(before, name) != getattr(plan, name)]


class RunRecord(BaseModel):
    """State of a local run."""

    model_config = ConfigDict(extra="ignore")
    plan_sha256: str
    finished: list[Role] = []
    """Roles that ended with success, in order."""
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
        """The role that was begun last and has not ended with success."""
        return next((role for role in reversed(list(self.next_attempt)) if role not in self.finished), None)

    @field_validator("restarts", mode="before")
    @classmethod
    def _migrate_single_budget(cls, value: object) -> object:
        """A record of version 0.1 has one budget for all roles: it is the gang's."""
        return {Role.TRAIN: value} if isinstance(value, dict) and "counted" in value else value


def read_record(path: Path) -> RunRecord | None:
    """The record, or None where there is none or it cannot be read."""
    try:
        return RunRecord.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None


def write_record(path: Path, record: RunRecord) -> None:
    """Replace the record."""
    _replace(path, record.model_dump_json(indent=2))


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically: readers see the old text or the new one."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)

"""The directory of a job's local runs: plan, record, links to claims, termination messages and output of the roles.

The record is what is known between two commands: kept with its plan, replaced as a whole.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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
    def record(self) -> Path:
        return self.root / "record.json"

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


@contextmanager
def locked(place: RunDirectory) -> Iterator[int]:
    """Keep other commands from this job while one runs; the descriptor of the lock, for processes that must keep it.

    Raises LocalError where another command, or a process that it left behind, holds the job.
    """
    place.root.mkdir(parents=True, exist_ok=True)
    with (place.root / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LocalError(
                f"{place.root.name}: another finetune run works on this job; wait for it, end it, or give the job another name",
                ExitCode.FAILED,
            ) from error
        yield lock.fileno()


def start_fresh(place: RunDirectory) -> None:
    """Remove what an earlier run of this job left: its workspace, and its results where its record proves them."""
    record = read_record(place.record)
    if record is not None and place.plan.exists():
        before = RunPlan.model_validate_json(place.plan.read_bytes())
        output = OutputLayout(_path(place, before.output))
        workspace = _path(place, before.workspace)
        merged = output.merged_paths()
        for directory in (output.adapter, merged.verified, merged.unverified, merged.quarantined, workspace):
            shutil.rmtree(directory, ignore_errors=True)
        if Role.MERGE in record.next_attempt:
            # A run that never came to its merge wrote none of these; a README.md that stands there is the user's own.
            for file in (output.verification, output.verification_page, output.provenance, output.model_card, output.checksums):
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
    place.plan.write_text(text)
    return record or RunRecord(plan_sha256=sha256)


def _differences(place: RunDirectory, plan: RunPlan) -> list[str]:
    try:
        before = RunPlan.model_validate_json(place.plan.read_bytes())
    except (OSError, ValueError):
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
    """Of each role: none draws on another's budget."""
    seconds: dict[Role, float] = {}
    """Time that each role has taken over all its attempts."""
    facts: dict[Role, dict[str, str]] = {}
    """What each role reported when it succeeded."""

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
    fresh = path.with_suffix(".new")
    fresh.write_text(record.model_dump_json(indent=2))
    fresh.replace(path)

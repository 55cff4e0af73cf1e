"""Where a local run keeps what belongs to neither claim: plan, record, links, termination messages, output of the roles."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from finetune_cli.exit_codes import ExitCode
from finetune_cli.local.errors import LocalError
from finetune_cli.local.record import RunRecord, read_record
from finetune_job.api.base import ClaimPath
from finetune_job.layout import OutputLayout
from finetune_job.names import Role
from finetune_job.plan.digest import canonical_json, text_sha256
from finetune_job.plan.run_plan import JobIdentity, RunPlan


@dataclass(frozen=True)
class RunPlace:
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


def place_of(claims: Path, job: JobIdentity, purpose: str = "") -> RunPlace:
    """Beside the claims; a name that starts with a dot is no claim's. `purpose`: of another command than `finetune run`."""
    # No name of a job has an underscore.
    suffix = f"_{purpose}" if purpose else ""
    return RunPlace(claims.absolute() / ".finetune" / f"{job.namespace}.{job.name}{suffix}")


@contextmanager
def held(place: RunPlace) -> Iterator[int]:
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


def start_fresh(place: RunPlace) -> None:
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


def _path(place: RunPlace, location: ClaimPath) -> Path:
    return (place.claims / location.claim).resolve() / location.path


def freeze(place: RunPlace, plan: RunPlan) -> RunRecord:
    """Write the plan, or find that an earlier run has frozen the same one; the record to go on from. Raises LocalError."""
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


def _differences(place: RunPlace, plan: RunPlan) -> list[str]:
    try:
        before = RunPlan.model_validate_json(place.plan.read_bytes())
    except (OSError, ValueError):
        return []
    return [name for name in RunPlan.model_fields if getattr(before, name) != getattr(plan, name)]

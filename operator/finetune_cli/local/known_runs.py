"""The runs below a directory of claims on this machine, which other commands list, follow and stop."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_cli.local.launch import POLL_SECONDS
from finetune_cli.local.rank_zero import read_progress
from finetune_cli.local.role_output import RoleOutput
from finetune_cli.local.run_directory import Holder, RunDirectory, RunRecord, holder_of, read_plan, read_record
from finetune_job.layout import WorkspaceLayout
from finetune_job.names import Role
from finetune_job.plan.run_plan import RunPlan
from finetune_job.progress import Progress

if TYPE_CHECKING:
    from finetune_cli.local.local_run import RunListener


@dataclass(frozen=True)
class KnownRun:
    """A job that was run here."""

    place: RunDirectory
    plan: RunPlan
    record: RunRecord
    holder: Holder | None
    """The command that is working on the run; None: there is none."""

    @property
    def title(self) -> str:
        """Namespace and name."""
        return f"{self.plan.job.namespace}/{self.plan.job.name}"

    def progress(self) -> Progress | None:
        """Return the progress of rank 0; None if the run does not train, or if rank 0 does not answer."""
        if self.holder is None or self.record.stage is not Role.TRAIN:
            return None
        location = self.plan.workspace
        workspace = WorkspaceLayout(self.place.claims / location.claim / location.path)
        return read_progress(workspace.root, self.record.next_attempt[Role.TRAIN] - 1)


def known_runs(claims: Path) -> list[KnownRun]:
    """List the runs, sorted by name; directories without a readable plan and record are left out."""
    runs = (_known_run(RunDirectory(directory)) for directory in sorted(claims.absolute().glob(".finetune/*")))
    return [run for run in runs if run is not None]


def _known_run(place: RunDirectory) -> KnownRun | None:
    plan, record = read_plan(place), read_record(place.record)
    return None if plan is None or record is None else KnownRun(place, plan, record, holder_of(place))


def named_runs(claims: Path, name: str, namespace: str | None) -> list[KnownRun]:
    """List the runs with a name, in one namespace or, for None, in any. Raises LocalError if there is none."""
    runs = [run for run in known_runs(claims) if run.plan.job.name == name and namespace in (None, run.plan.job.namespace)]
    if not runs:
        title, listing = f"{namespace}/{name}" if namespace else name, shlex.join(["finetune", "list", "--claims", str(claims)])
        raise LocalError(f"{title}: no such run below {claims}; `{listing}` lists the existing ones")
    return runs


def find_run(claims: Path, name: str, namespace: str) -> KnownRun:
    """Find a job that is running. Raises LocalError."""
    run = named_runs(claims, name, namespace)[0]  # a rehearsal of the same job is sorted after it
    if run.holder is None:
        raise LocalError(f"{run.title} is not running", ExitCode.FAILED)
    return run


def stop(run: KnownRun, seconds: float) -> None:
    """Ask the command that runs the job to stop, and wait until its processes have ended. Raises LocalError after `seconds`."""
    if run.holder is not None and run.holder.pid:
        with contextlib.suppress(ProcessLookupError):  # the process has just ended
            os.kill(run.holder.pid, signal.SIGTERM)
    deadline = time.monotonic() + seconds
    while (holder := holder_of(run.place)) is not None:
        if time.monotonic() > deadline:
            raise LocalError(
                f"{run.title}: process {holder.pid} is still running after {seconds:.0f} s. Wait until its state is saved, or "
                "run `finetune stop` again to kill it at once",
                ExitCode.FAILED,
            )
        time.sleep(POLL_SECONDS)


def attach(run: KnownRun, audience: RunListener) -> None:
    """Report the progress of a run for as long as another command works on it."""
    last: tuple[Role, int] | None = None
    heard: RoleOutput | None = None
    now: KnownRun | None = run
    while now is not None and now.holder is not None:
        stage = now.record.stage
        if stage is not None and (stage, now.record.next_attempt[stage]) != last:
            last = stage, now.record.next_attempt[stage]
            attempt = last[1] - 1
            output = now.place.output(stage, attempt)
            heard = RoleOutput(output, from_end=heard is None)
            audience.started(stage, attempt, output)
        for line in heard.new_lines() if heard is not None else ():
            audience.said(line)
        progress = now.progress()
        if progress is not None:
            audience.progressed(progress)
        time.sleep(POLL_SECONDS)
        now = _known_run(now.place)

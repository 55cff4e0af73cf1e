"""`finetune rehearse`: tries a job on a scaled-down model, on this machine, without its data."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from finetune_cli.commands.run import Options, RunEnd, accepted_job, local_plan
from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_cli.local.claims import check_given, claim_directories, claims_of, link_claims
from finetune_cli.local.launch import Interruption, check_trainer
from finetune_cli.local.local_run import LocalRun
from finetune_cli.local.programs import run_rehearsal
from finetune_cli.local.run_directory import RunDirectory, freeze, locked, run_directory_of
from finetune_cli.render.run import LiveView, View
from finetune_cli.render.signs_of_life import SILENCE_SECONDS
from finetune_cli.render.verdicts import finding_text
from finetune_job.finding import Finding
from finetune_job.names import Role
from finetune_job.plan.run_plan import RunPlan

_PASSED, _NOT_DONE = "Passed", "NotDone"


def rehearse_job(manifest: str, options: Options, seconds: float) -> ExitCode:
    """Rehearse the one job of a manifest for at most `seconds`. Raises LocalError."""
    console = Console(highlight=False)
    accepted = accepted_job(manifest, console)
    if isinstance(accepted, RunEnd):
        return accepted.exit_code
    check_trainer()
    plan = local_plan(accepted, own_output=False)
    place = run_directory_of(options.claims, plan.job, purpose="rehearsal")
    named = claims_of(plan)
    check_given(named, options.claim_paths)
    # A rehearsal needs neither records nor results, so without a fetch only the claim of the model is needed.
    needed = named if plan.fetch is not None else [use for use in named if use.name == plan.model.location.claim]
    with locked(place) as lock, Interruption(stopping="the rehearsal is stopped") as interruption:
        link_claims(needed, claim_directories(needed, options.claims, options.claim_paths), place.claims)
        if plan.fetch is not None:
            place.record.unlink(missing_ok=True)
            with LiveView(console, plan.job.name) as view:
                fetch = LocalRun(place, plan, freeze(place, plan), lock, view)
                code = fetch.execute(accepted.spec.run.max_restarts, interruption, roles=(Role.FETCH,))
            if code is not ExitCode.DONE:
                return code
        return _rehearse(place, plan, seconds, console, interruption)


def _rehearse(place: RunDirectory, plan: RunPlan, seconds: float, console: Console, interruption: Interruption) -> ExitCode:
    scratch, log = place.root / "scratch", place.root / "rehearsal.log"
    shutil.rmtree(scratch, ignore_errors=True)
    model = (place.claims / plan.model.location.claim).resolve() / plan.model.location.path
    heard = _RehearsalPrinter(console, plan.job.name)
    try:
        with heard:
            heard.begins(log)
            arguments = ["--check-model", "--model", str(model), "--scratch", str(scratch), "--seconds", str(seconds)]
            status = run_rehearsal(plan, arguments, log, interruption, heard.take)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if interruption.requested:
        return ExitCode.INTERRUPTED
    if status != 0:
        raise LocalError(f"the rehearsal exited with status {status}; its output is in {log}", ExitCode.FAILED)
    return heard.exit_code


class _RehearsalPrinter(View):
    """Prints what the rehearsal process reports."""

    def __init__(self, console: Console, job: str, *, silence_seconds: float = SILENCE_SECONDS) -> None:
        super().__init__(console, prefix=f"{job}: ", silence_seconds=silence_seconds)
        self._job = job
        self.exit_code = ExitCode.REFUSED

    def begins(self, log: Path) -> None:
        """Print what the rehearsal will do, and that `log` holds the output of libraries."""
        self._print(f"{self._job}: looking at the model, then trying the job on a scaled-down one (output: {log})")
        self._signs.doing("looking at the model")

    def take(self, line: Mapping[str, Any]) -> None:
        if "finding" in line:
            self._print(finding_text(Finding.model_validate(line["finding"])))
        elif "stage" in line:
            self._print(stage_text(line["stage"]))
            self._signs.doing("rehearsing")
            self._signs.detail(f"the last stage that has ended is {line['stage']['stage']}")
        elif "report" in line:
            report = line["report"]
            for finding in report["findings"]:
                self._print(finding_text(Finding.model_validate(finding)))
            self._print(rehearsal_text(self._job, report))
            self.exit_code = {_PASSED: ExitCode.DONE, _NOT_DONE: ExitCode.FAILED}.get(report["verdict"], ExitCode.REFUSED)


def stage_text(stage: Mapping[str, Any]) -> str:
    """Return the line that reports a finished stage."""
    problem = str(stage["problem"]).strip().splitlines()
    ending = "right" if not problem else f"wrong: {problem[0]}"
    return f"  {stage['stage']:8} {stage['seconds']:5.1f} s  {ending}"


def rehearsal_text(job: str, report: Mapping[str, Any]) -> str:
    """Return the verdict, and what was changed for the rehearsal."""
    verdicts = {
        "Passed": "passed: every stage succeeded on a scaled-down model",
        "Failed": "failed: the job would fail",
        "NotDone": "could not be completed",
    }
    verdict = verdicts.get(report["verdict"], report["verdict"])
    cost = f"{report['seconds']:.1f} s, {report['peak_memory_bytes'] / 2**20:.0f} MiB, {report['parameters']} parameters"
    lines = ["", f"{job}: the rehearsal {verdict} ({cost})"]
    if report["changes"]:
        lines += ["", "  Changed for the rehearsal:", *(f"    {change}" for change in report["changes"])]
    return "\n".join(lines)

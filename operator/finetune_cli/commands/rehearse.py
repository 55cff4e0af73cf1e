"""`finetune rehearse`: a job tried on a small twin of its model, on this machine, without preparing its data."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from finetune_cli.commands.run import Options, accepted_job, check_given, local_plan
from finetune_cli.exit_codes import ExitCode
from finetune_cli.local.claims import claims_of, directories, link_claims
from finetune_cli.local.errors import LocalError
from finetune_cli.local.launch import Interruption
from finetune_cli.local.place import RunPlace, freeze, held, place_of
from finetune_cli.local.rehearsal_process import RehearsalOrder, run_rehearsal
from finetune_cli.local.stages import LocalRun
from finetune_cli.local.trainer import check_trainer
from finetune_cli.render.live import LiveView
from finetune_cli.render.rehearsal import rehearsal_text, stage_text
from finetune_cli.render.text import finding_text
from finetune_job.names import Role
from finetune_job.plan.run_plan import RunPlan
from finetune_job.rules.rule import Finding

_PASSED, _NOT_DONE = "Passed", "NotDone"


def rehearse_job(manifest: str, options: Options, seconds: float) -> ExitCode:
    """Try the one job of a manifest for so long at most. Raises LocalError."""
    console = Console(highlight=False)
    accepted = accepted_job(manifest, console)
    if isinstance(accepted, ExitCode):
        return accepted
    check_trainer()
    plan = local_plan(accepted, own_output=False)
    place = place_of(options.claims, plan.job, purpose="rehearsal")
    named = claims_of(plan)
    check_given(named, options.claim_paths)
    # Of claims without records, and without results, nothing is needed.
    needed = named if plan.fetch is not None else [use for use in named if use.name == plan.model.location.claim]
    with held(place) as lock, Interruption() as interruption:
        link_claims(needed, directories(needed, options.claims, options.claim_paths), place.claims)
        if plan.fetch is not None:
            place.record.unlink(missing_ok=True)
            with LiveView(console, plan.job.name) as view:
                fetch = LocalRun(place, plan, freeze(place, plan), lock, view)
                code = fetch.execute(accepted.spec.run.max_restarts, interruption, roles=(Role.FETCH,))
            if code is not ExitCode.DONE:
                return code
        return _rehearse(place, plan, seconds, console, interruption)


def _rehearse(place: RunPlace, plan: RunPlan, seconds: float, console: Console, interruption: Interruption) -> ExitCode:
    scratch, log = place.root / "scratch", place.root / "rehearsal.log"
    shutil.rmtree(scratch, ignore_errors=True)
    model = (place.claims / plan.model.location.claim).resolve() / plan.model.location.path
    heard = _Heard(console, plan.job.name)
    try:
        status = run_rehearsal(RehearsalOrder(plan, model, scratch, log, seconds), interruption, heard.take)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if interruption.requested:
        return ExitCode.INTERRUPTED
    if status != 0:
        raise LocalError(f"the rehearsal ended with status {status}; its output is in {log}", ExitCode.FAILED)
    return heard.exit_code


class _Heard:
    """What the process says, on a terminal, and what follows from it."""

    def __init__(self, console: Console, job: str) -> None:
        self._console, self._job = console, job
        self.exit_code = ExitCode.REFUSED

    def take(self, said: Mapping[str, Any]) -> None:
        if "finding" in said:
            self._print(finding_text(Finding.model_validate(said["finding"])))
        elif "stage" in said:
            self._print(stage_text(said["stage"]))
        elif "report" in said:
            report = said["report"]
            for finding in report["findings"]:
                self._print(finding_text(Finding.model_validate(finding)))
            self._print(rehearsal_text(self._job, report))
            self.exit_code = {_PASSED: ExitCode.DONE, _NOT_DONE: ExitCode.FAILED}.get(report["verdict"], ExitCode.REFUSED)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

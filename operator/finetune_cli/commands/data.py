"""`finetune data`: the first records of a job as training will see them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from finetune_cli.checks.validate import DocumentOutcome, Report, validate
from finetune_cli.exit_codes import LocalError
from finetune_cli.local.claims import claim_directories, claims_of
from finetune_cli.local.look import Look, look
from finetune_job.names import JOB_KIND
from finetune_job.plan.run_plan import RunPlan

LOCAL_UID = "local"
"""As a run on this machine has it, whose fetched sources are looked at."""


def look_at(manifest: str, claims: Path, claim_paths: Mapping[str, Path], *, shown: int, limit: int) -> Look | Report:
    """Of the one job of a manifest; the report if that is refused. Raises LocalError."""
    report = validate(manifest)
    plans = [verdict.plan for verdict in report.verdicts if verdict.kind == JOB_KIND and verdict.plan is not None]
    if any(verdict.outcome in (DocumentOutcome.REFUSED, DocumentOutcome.UNUSABLE) for verdict in report.verdicts):
        return report
    if len(plans) != 1:
        raise LocalError(f"the manifest holds {len(plans)} FineTuneJobs; give one at a time")
    directories = local_claims(plans[0], claims, claim_paths)
    for field, claim in _data_claims(plans[0]):
        if claim not in directories:
            place = claim_paths.get(claim, claims / claim)
            raise LocalError(
                f"{field}: claim {claim} is the directory {place}, which does not exist; say where it is with --claims DIR or "
                f"--claim {claim}=PATH"
            )
    return look(plans[0], directories, shown=shown, limit=limit)


def local_claims(plan: RunPlan, claims: Path, claim_paths: Mapping[str, Path]) -> dict[str, Path]:
    """Directories of the plan's claims that are on this machine."""
    found = claim_directories(claims_of(plan), claims, claim_paths)
    return {name: place for name, place in found.items() if place.is_dir()}


def _data_claims(plan: RunPlan) -> list[tuple[str, str]]:
    held_out = [] if plan.data.validation is None else [plan.data.validation]
    return [(each.field, each.location.claim) for each in (*plan.data.train, *held_out)]

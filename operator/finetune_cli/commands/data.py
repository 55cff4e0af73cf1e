"""`finetune data`: the first records of a job as training will see them; and what `validate` and `run` say of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from finetune_cli.checks.validate import DocumentOutcome, DocumentVerdict, Report, validate
from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_cli.local.claims import LOCAL_UID, claim_directories, claims_of
from finetune_cli.local.look import FIRST_JUDGED, Look, look
from finetune_job.api.job import FineTuneJob
from finetune_job.finding import Finding
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import JobIdentity, RunPlan


def look_at(manifest: str, claims: Path, claim_paths: Mapping[str, Path], *, shown: int, limit: int) -> Look | Report:
    """Of the one job of a manifest; the report if that is refused. Raises LocalError."""
    report = validate(manifest)
    if report.exit_code is not ExitCode.DONE:
        return report
    jobs = [verdict.job for verdict in report.verdicts if verdict.job is not None]
    if len(jobs) != 1:
        raise LocalError(f"the manifest holds {len(jobs)} FineTuneJobs; give one at a time")
    plan = _plan_here(jobs[0])
    directories = local_claims(plan, claims, claim_paths)
    for field, claim in _data_claims(plan):
        if claim not in directories:
            place = claim_paths.get(claim, claims / claim)
            raise LocalError(
                f"{field}: claim {claim} is the directory {place}, which does not exist; say where it is with --claims DIR or "
                f"--claim {claim}=PATH"
            )
    return look(plan, directories, shown=shown, limit=limit)


@dataclass(frozen=True)
class FirstRecords:
    """The first records of jobs, as far as they are on this machine."""

    claims: Path
    """Holds a directory for each claim."""
    claim_paths: Mapping[str, Path]
    """Directories of claims that are elsewhere."""
    is_given: bool
    """The user said where the claims are, so that what they lack is a finding; else nothing that is missing is."""

    def judged(self, report: Report, say: Callable[[str], None]) -> Report:
        """With what they show of accepted jobs. If nobody said where the claims are, records that cannot be looked at are told
        with `say`; else it raises LocalError.
        """
        verdicts = []
        for verdict in report.verdicts:
            try:
                verdicts.append(self._judged(verdict))
            except LocalError as error:
                if self.is_given:
                    raise
                say(f"{verdict.name}: judged without its first records: {error}")
                verdicts.append(verdict)
        return Report(tuple(verdicts))

    def findings(self, job: FineTuneJob) -> tuple[Finding, ...]:
        """Of an accepted job; none if they cannot be looked at, which `judged` tells."""
        try:
            return self._look(job).findings
        except LocalError:
            return ()

    def _judged(self, verdict: DocumentVerdict) -> DocumentVerdict:
        if verdict.job is None or verdict.outcome is not DocumentOutcome.ACCEPTED:
            return verdict
        seen = self._look(verdict.job)
        outcome = DocumentOutcome.REFUSED if seen.is_refused else verdict.outcome
        return replace(verdict, outcome=outcome, findings=(*verdict.findings, *seen.findings))

    def _look(self, job: FineTuneJob) -> Look:
        plan = _plan_here(job)
        directories = local_claims(plan, self.claims, self.claim_paths)
        if all(claim not in directories for _, claim in (*_data_claims(plan), ("", plan.model.location.claim))):
            return Look()
        return look(plan, directories, limit=FIRST_JUDGED, must_exist=self.is_given)


def local_claims(plan: RunPlan, claims: Path, claim_paths: Mapping[str, Path]) -> dict[str, Path]:
    """Directories of the plan's claims that are on this machine."""
    found = claim_directories(claims_of(plan), claims, claim_paths)
    return {name: place for name, place in found.items() if place.is_dir()}


def _plan_here(job: FineTuneJob) -> RunPlan:
    """As a run on this machine has it, whose fetched sources are looked at."""
    return resolve(JobIdentity(namespace=job.metadata.namespace, name=job.metadata.name, uid=LOCAL_UID), job.spec, profile=None)


def _data_claims(plan: RunPlan) -> list[tuple[str, str]]:
    held_out = [] if plan.data.validation is None else [plan.data.validation]
    return [(each.field, each.location.claim) for each in (*plan.data.train, *held_out)]

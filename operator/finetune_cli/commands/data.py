"""`finetune data`: shows a job's first records as training will see them, and returns the findings of `validate` about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from finetune_cli.checks.validate import DocumentOutcome, DocumentVerdict, Report, validate
from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_cli.local.claims import LOCAL_UID, check_given, claim_directories, claims_of
from finetune_cli.local.look import FIRST_JUDGED, Look, look
from finetune_job.api.job import FineTuneJob
from finetune_job.device import LARGE_ON_CPU, large_on_cpu
from finetune_job.finding import Finding
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import JobIdentity, RunPlan
from finetune_memory.describe import experts_told, number_of_weights
from finetune_memory.model_shape import UnknownModelError


def look_at(manifest: str, claims: Path, claim_paths: Mapping[str, Path], *, shown: int, limit: int) -> Look | Report:
    """Examine the first records of a manifest's only job; if the rules refuse the job, return their report. Raises LocalError."""
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
    """The models and first records of jobs, if they are on this machine."""

    claims: Path
    """Directory that holds a directory for each claim."""
    claim_paths: Mapping[str, Path]
    """Directories of claims that are elsewhere."""
    is_given: bool
    """Whether the user said where the claims are. If so, missing files are findings."""

    def judged(self, report: Report, say: Callable[[str], None]) -> Report:
        """Add the findings on the first records of accepted jobs to a report.

        Raises LocalError for unreadable records if the user named the claims; otherwise only reports them with `say`.
        """
        plans = [None if verdict.job is None else _plan_here(verdict.job) for verdict in report.verdicts]
        # A job that cannot be parsed may use any of the given claims, so they are not checked.
        if any(plans) and all(verdict.outcome is not DocumentOutcome.UNUSABLE for verdict in report.verdicts):
            uses = [use for plan in plans if plan is not None for use in claims_of(plan)]
            check_given(list({use.name: use for use in uses}.values()), self.claim_paths)
            inputs = {use.name for use in uses if use.is_input}
            for name, place in self.claim_paths.items():
                if name in inputs and not place.is_dir():
                    raise LocalError(f"--claim {name}={place}: this directory does not exist; correct the path")
        accepted = {
            number: plan
            for number, (verdict, plan) in enumerate(zip(report.verdicts, plans, strict=True))
            if plan is not None and verdict.outcome is DocumentOutcome.ACCEPTED
        }
        if self.is_given:
            for line in self._absent([(report.verdicts[number].name, plan) for number, plan in accepted.items()]):
                say(line)
        verdicts = []
        for number, verdict in enumerate(report.verdicts):
            try:
                verdicts.append(self._judged(verdict, accepted[number]) if number in accepted else verdict)
            except LocalError as error:
                if self.is_given:
                    raise
                say(f"{verdict.name}: judged without its first records: {error}")
                verdicts.append(verdict)
        return Report(tuple(verdicts))

    def findings(self, job: FineTuneJob) -> tuple[Finding, ...]:
        """Return the findings on the first records of an accepted job; none for unreadable records, which `judged` reports."""
        plan = _plan_here(job)
        try:
            return self._look(plan, local_claims(plan, self.claims, self.claim_paths)).findings
        except LocalError:
            return ()

    def _absent(self, jobs: Sequence[tuple[str, RunPlan]]) -> list[str]:
        """Describe the claims of models and data that are missing on this machine. Raises LocalError if all are missing."""
        told, is_any_here = [], False
        for name, plan in jobs:
            uses = claims_of(plan)
            places = claim_directories(uses, self.claims, self.claim_paths)
            for use in uses:
                if places[use.name].exists() and not places[use.name].is_dir():
                    raise LocalError(
                        f"{use.field}: claim {use.name} is {places[use.name]}, which is a file; give a directory, or move it away"
                    )
            inputs = [use for use in uses if use.is_input]
            absent = [use for use in inputs if not places[use.name].is_dir()]
            is_any_here = is_any_here or len(absent) < len(inputs)
            told += [
                (name, use, f"{use.field}: claim {use.name} is the directory {places[use.name]}, which does not exist")
                for use in absent
            ]
        if told and not is_any_here:
            _, use, words = told[0]
            raise LocalError(f"{words}; say where it is with --claims DIR or --claim {use.name}=PATH")
        return [f"{name}: {words}, so it is not checked" for name, _, words in told]

    def _judged(self, verdict: DocumentVerdict, plan: RunPlan) -> DocumentVerdict:
        directories = local_claims(plan, self.claims, self.claim_paths)
        seen = self._look(plan, directories)
        outcome = DocumentOutcome.REFUSED if seen.is_refused else verdict.outcome
        findings = (*verdict.findings, *_of_model_files(verdict, plan, directories), *seen.findings)
        return replace(verdict, outcome=outcome, findings=findings)

    def _look(self, plan: RunPlan, directories: Mapping[str, Path]) -> Look:
        if all(claim not in directories for _, claim in (*_data_claims(plan), ("", plan.model.location.claim))):
            return Look()
        given = self.is_given
        return look(plan, directories, limit=FIRST_JUDGED, must_exist=given, checks_model=given, checks_results=given)


def local_claims(plan: RunPlan, claims: Path, claim_paths: Mapping[str, Path]) -> dict[str, Path]:
    """Return the directories of those claims of a plan that are on this machine."""
    directories = claim_directories(claims_of(plan), claims, claim_paths)
    return {name: place for name, place in directories.items() if place.is_dir()}


def _of_model_files(verdict: DocumentVerdict, plan: RunPlan, directories: Mapping[str, Path]) -> list[Finding]:
    """Warn if the model's files are too large for CPU cores, or if QLoRA packs only a little of a mixture of experts."""
    location = plan.model.location
    if location.claim not in directories:
        return []
    model, findings = directories[location.claim] / location.path, list[Finding | None]()
    placement = None if verdict.plan is None else verdict.plan.placement
    is_on_cpu = placement is not None and placement.gpu_resource_name is None
    # Other checks report a model that cannot be read.
    with suppress(UnknownModelError, ValueError):
        if verdict.plan is not None and is_on_cpu and all(finding.rule != LARGE_ON_CPU for finding in verdict.findings):
            findings.append(large_on_cpu(verdict.plan, number_of_weights(model)))
    with suppress(UnknownModelError, ValueError):
        if plan.method.quantization is not None:
            findings.append(experts_told(plan, model))
    return [finding for finding in findings if finding is not None]


def _plan_here(job: FineTuneJob) -> RunPlan:
    """Return the plan of a local run of this job, which names the places where an earlier local run has put the sources."""
    return resolve(JobIdentity(namespace=job.metadata.namespace, name=job.metadata.name, uid=LOCAL_UID), job.spec, profile=None)


def _data_claims(plan: RunPlan) -> list[tuple[str, str]]:
    held_out = [] if plan.data.validation is None else [plan.data.validation]
    return [(each.field, each.location.claim) for each in (*plan.data.train, *held_out)]

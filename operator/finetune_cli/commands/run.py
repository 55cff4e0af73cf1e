"""`finetune run`: runs the job of a manifest as local processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from finetune_cli.checks.validate import DocumentOutcome, validate
from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_cli.local.claims import LOCAL_UID, OUTPUT_CLAIM, check_given, claim_directories, claims_of, link_claims
from finetune_cli.local.launch import Interruption, check_trainer
from finetune_cli.local.local_run import LocalRun
from finetune_cli.local.look import FIRST_JUDGED, NOT_OF_PREFLIGHT, look
from finetune_cli.local.run_directory import begun_with, freeze, locked, run_directory_of, start_fresh
from finetune_cli.local.summary import Summary, summarise
from finetune_cli.render.run import LiveView, summary_document, summary_text
from finetune_cli.render.verdicts import finding_text, report_text
from finetune_job.api.base import ClaimPath
from finetune_job.api.job import FineTuneJob
from finetune_job.api.training import GradientReduction
from finetune_job.failures import Outcome, TerminationReport
from finetune_job.finding import Finding
from finetune_job.names import JOB_KIND, Role
from finetune_job.plan.resolve import resolve
from finetune_job.plan.resolve_training import world_size
from finetune_job.plan.run_plan import JobIdentity, RunPlan
from finetune_memory.this_machine import gpu_mebibytes


@dataclass(frozen=True)
class Options:
    """Arguments of the command."""

    claims: Path
    claim_paths: Mapping[str, Path]
    output_directory: Path | None
    fresh: bool
    ranks: int | None = None
    """Number of ranks; None: the job's number."""


@dataclass(frozen=True)
class RunEnd:
    """How the command ended."""

    exit_code: ExitCode
    job: JobIdentity | None = None
    findings: Sequence[Finding] = field(default_factory=list)
    """Findings of a job that was refused before anything ran."""
    last: TerminationReport | None = None
    """Report of the role that ran last; None: no role ran."""
    summary: Summary | None = None


def run_job(manifest: str, options: Options, console: Console) -> RunEnd:
    """Run the one job of a manifest, and report on the console. Raises LocalError."""
    job = accepted_job(manifest, console)
    if isinstance(job, RunEnd):
        return job
    check_trainer()
    planned = partial(local_plan, job, options.output_directory is not None, options.ranks)
    on_gpu = bool(gpu_mebibytes())
    plan = planned(on_gpu=on_gpu)
    if plan.parallelism.fsdp.offload_params and plan.parallelism.world_size > 1 and not on_gpu:
        raise LocalError(
            "spec.parallelism.fsdp.offloadParams: true: this machine has no GPU, so parameters are in the CPU's memory anyway, "
            "and pinning them fails without a GPU driver; remove it",
            ExitCode.REFUSED,
        )
    claims = claims_of(plan)
    given = dict(options.claim_paths)
    if options.output_directory is not None:
        given[OUTPUT_CLAIM] = options.output_directory
    check_given(claims, given)
    place = run_directory_of(options.claims, plan.job)
    with locked(place) as lock:
        if options.fresh:
            start_fresh(place)
        # A run keeps its first plan, even if devices were added or removed since then.
        plan = begun_with(place, plan) or begun_with(place, planned(on_gpu=not on_gpu)) or plan
        record = freeze(place, plan)
        directories = claim_directories(claims, options.claims, given)
        link_claims(claims, directories, place.claims)
        refusing = [] if Role.PREFLIGHT in record.finished else _refused_at_once(plan, directories, console)
        if refusing:
            return RunEnd(ExitCode.REFUSED, plan.job, refusing)
        with LiveView(console, plan.job.name) as view, Interruption() as interruption:
            local_run = LocalRun(place, plan, record, lock, view, ranks=options.ranks)
            code = local_run.execute(job.spec.run.max_restarts, interruption)
        return RunEnd(code, plan.job, [], local_run.last, summarise(plan, local_run.record, place.claims))


def run_text(end: RunEnd) -> str:
    """Return the text that is printed when the command ends."""
    return "" if end.summary is None else summary_text(end.exit_code, end.summary)


def run_document(end: RunEnd) -> dict[str, Any]:
    """Return, as plain data, how the command ended."""
    failed = end.last if end.last is not None and end.last.outcome is not Outcome.SUCCEEDED else None
    findings = end.findings or (failed.findings if failed is not None else [])
    return {
        "outcome": end.exit_code.name.lower(),
        "job": None if end.job is None else {"namespace": end.job.namespace, "name": end.job.name},
        "findings": [finding.model_dump(mode="json") for finding in findings],
        "failure": None
        if failed is None
        else {"role": failed.role, "class": failed.failure, "message": failed.message, "hint": failed.hint or None},
        **({} if end.summary is None else summary_document(end.summary)),
    }


def _refused_at_once(plan: RunPlan, directories: Mapping[str, Path], console: Console) -> Sequence[Finding]:
    """Check the model's files, the first records and the places of the results before anything slow is imported.

    Return all findings if one of them refuses the job, otherwise none. Raises LocalError.
    """
    seen = look(plan, directories, limit=FIRST_JUDGED, checks_model=True, checks_places=True)
    findings = [finding for finding in seen.findings if seen.is_refused or finding.rule in NOT_OF_PREFLIGHT]
    for finding in findings:
        console.print(finding_text(finding), markup=False, soft_wrap=True)
    return findings if seen.is_refused else []


def accepted_job(manifest: str, console: Console) -> FineTuneJob | RunEnd:
    """Return the one job of a manifest. If the rules refuse it, print why and return how the command ends. Raises LocalError."""
    report = validate(manifest)
    verdicts = [verdict for verdict in report.verdicts if verdict.kind == JOB_KIND]
    if report.exit_code is not ExitCode.DONE:
        console.print(report_text(report), markup=False, end="", soft_wrap=True)
        return RunEnd(report.exit_code, findings=[finding for verdict in report.verdicts for finding in verdict.findings])
    jobs = [verdict.job for verdict in verdicts if verdict.outcome is DocumentOutcome.ACCEPTED and verdict.job is not None]
    if len(jobs) != 1:
        raise LocalError(f"the manifest holds {len(jobs)} FineTuneJobs; give one at a time")
    for finding in verdicts[0].findings:
        console.print(finding_text(finding), markup=False, soft_wrap=True)
    return jobs[0]


def local_plan(job: FineTuneJob, own_output: bool, ranks: int | None = None, *, on_gpu: bool = False) -> RunPlan:
    """Return the plan of a job on this machine. `own_output`: whether results go to a separate directory. `ranks`: number of
    training ranks; None: the job's number. `on_gpu`: whether the ranks find a GPU. Raises LocalError.
    """
    is_ordered, most = job.spec.training.reduction is GradientReduction.ORDERED, world_size(job.spec)
    if ranks is not None and not is_ordered:
        raise LocalError(
            f"--ranks {ranks}: a job that runs on a different number of ranks trains different bytes; "
            "set spec.training.reduction to Ordered, or change spec.parallelism",
            ExitCode.REFUSED,
        )
    if ranks is not None and ranks > most:
        raise LocalError(f"--ranks {ranks}: the job has {most}; give at most as many", ExitCode.REFUSED)
    if ranks is None and job.spec.parallelism.nodes > 1:
        fewer = f"give --ranks 1 to {most}" if is_ordered else "set it to 1 and raise processesPerNode"
        raise LocalError(
            f"spec.parallelism.nodes: {job.spec.parallelism.nodes} cannot run on one machine; "
            f"{fewer}, or apply the job to a cluster",
            ExitCode.REFUSED,
        )
    identity = JobIdentity(namespace=job.metadata.namespace, name=job.metadata.name, uid=LOCAL_UID)
    plan = resolve(identity, job.spec, profile=None, has_gpu=on_gpu)
    return plan.model_copy(update={"output": ClaimPath(claim=OUTPUT_CLAIM), "publish": None}) if own_output else plan

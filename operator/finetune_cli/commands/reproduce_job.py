"""`finetune reproduce` of a job in a cluster: runs its spec as another job, and compares the digests of both results."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import closing

from finetune_cli.cluster.errors import ClusterError
from finetune_cli.cluster.objects import Cluster
from finetune_cli.cluster.reader_pod import read_workspace
from finetune_cli.commands.change_jobs import Change, submit
from finetune_cli.commands.follow import outcome, repeatedly
from finetune_cli.commands.inspect_jobs import status_answer
from finetune_cli.documents import document_text
from finetune_cli.exit_codes import LocalError
from finetune_cli.jobs.reproduction import (
    MERGED,
    RESULT_FILES,
    Results,
    has_error,
    inputs_differ,
    read_results,
    reproduces,
    reproduction_name,
    reproduction_of,
    results_differ,
)
from finetune_cli.jobs.seen import SeenJob
from finetune_cli.render.audit import AuditEnd, device_note
from finetune_cli.render.verdicts import report_text
from finetune_job.names import API_VERSION, JOB_PLURAL
from finetune_job.reasons import ConditionType


def reproduce_job(
    cluster: Cluster, name: str, new_name: str | None, nodes: int | None, report: Callable[[str], None], *, waits: bool
) -> Change | AuditEnd:
    """Run the spec of a job again as another job, unless that job exists already, and compare the results of both.

    nodes: number of nodes; None: the first job's. report: called with the new job's progress. waits: whether to wait for its end.
    Returns a Change if the job was created and is not waited for. Raises LocalError, ClusterError.
    """
    job = cluster.job(name)
    if not job.has_ended:
        raise ClusterError(f"{job.title} is {job.phase}; wait for its end with `{job.command('wait')}`")
    if job.phase != "Succeeded":
        raise LocalError(f"{job.title} has ended as {job.phase}, so it has no result to compare with")
    new_name = new_name or reproduction_name(job.name)
    again, expected = _made_already(cluster, job, new_name, nodes), None
    if again is None:
        # Results are read first, so that nothing is trained if there is nothing to compare with.
        expected = _results(cluster, job)
        made = _create(cluster, job, new_name, nodes)
        if not waits:
            return made
        report(made.text())
        again = made.job
    if waits:
        again = _ended(cluster, job, again, report)
    return _compared(cluster, job, again, expected)


def _made_already(cluster: Cluster, job: SeenJob, name: str, nodes: int | None) -> SeenJob | None:
    document = cluster.get(API_VERSION, JOB_PLURAL, name)
    if document is None:
        return None
    existing = cluster.seen(document)
    if not reproduces(document, job):
        raise LocalError(f"--name {name}: {existing.title} exists, and was not made to run {job.name} again; give another name")
    if nodes not in (None, existing.num_nodes):
        raise LocalError(
            f"--nodes {nodes}: {existing.title} runs {job.name} again on {existing.num_nodes} nodes; give a new --name"
        )
    return existing


def _create(cluster: Cluster, job: SeenJob, name: str, nodes: int | None) -> Change:
    # The results go to a new folder, because a job keeps complete files that an earlier attempt left in its folder.
    document = reproduction_of(job, name, nodes, f"{name}-{secrets.token_hex(4)}")
    report, made = submit(cluster, document_text(document), f"reproduction of {job.name}", None)
    if not made:
        raise LocalError(report_text(report).rstrip(), report.exit_code)
    message = f"created: it runs the spec of {job.name} again; `{job.command('reproduce', '--wait')}` compares the results"
    return Change(made[0].job, message)


def _ended(cluster: Cluster, job: SeenJob, again: SeenJob, report: Callable[[str], None]) -> SeenJob:
    """Return the new job as soon as it has ended, or its inputs turn out to differ from those of the original job."""

    def is_decided(seen: SeenJob | None) -> bool:
        return seen is not None and (outcome(seen, ConditionType.FINISHED) is not None or has_error(inputs_differ(job, seen)))

    losses: list[float] = []
    latest, shown = again, ""
    for latest in repeatedly(lambda: cluster.job(again.name), report, is_decided):
        if latest.resource_version != shown:
            shown = latest.resource_version
            report(status_answer(latest, losses, is_watched=True).text())
    return latest


def _compared(cluster: Cluster, job: SeenJob, again: SeenJob, expected: Results | None) -> AuditEnd:
    findings = inputs_differ(job, again)
    if has_error(findings):
        return AuditEnd(job.title, findings, run_again_as=again.title)
    if again.phase != "Succeeded":
        fix = (
            f"`{again.command('explain')}` says why"
            if again.has_ended or again.phase == "Stalled"
            else f"`{job.command('reproduce', '--wait')}` waits for its end"
        )
        raise ClusterError(f"{again.title} is {again.phase}, so there is nothing to compare with {job.name}; {fix}")
    expected = expected or _results(cluster, job)
    results = _results(cluster, again)
    findings += results_differ(expected, results, device_note(expected.devices, results.devices))
    return AuditEnd(
        job.title,
        findings,
        has_compared_result=True,
        has_compared_merged=any(name.startswith(f"{MERGED}/") for name in expected.files),
        run_again_as=again.title,
    )


def _results(cluster: Cluster, job: SeenJob) -> Results:
    with closing(read_workspace(cluster, job, list(RESULT_FILES), of_results=True)) as printed:
        return read_results(job, printed)

"""The verbs that look at jobs of a cluster, or, with --local or --claims, at runs on this machine."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finetune_cli.answers import Output, Panel, print_answer, tell
from finetune_cli.exit_codes import LocalError
from finetune_cli.jobs.durations import parse_duration
from finetune_job.names import Role

if TYPE_CHECKING:
    from finetune_cli.cluster.objects import Cluster
    from finetune_cli.commands.data import FirstRecords

DEFAULT_CLAIMS = Path("runs/claims")
cluster_app = typer.Typer()

Namespace = Annotated[str | None, typer.Option("-n", "--namespace", help="Namespace. Unset: that of the kubeconfig's context.")]
Context = Annotated[str | None, typer.Option(help="Context of the kubeconfig. Unset: the current one.")]
Everywhere = Annotated[bool, typer.Option("-A", "--all-namespaces", help="Jobs of all namespaces.")]
Form = Annotated[Output, typer.Option("-o", "--output", help="Form of the answer.")]
Local = Annotated[bool, typer.Option("--local", help="Use runs on this machine instead of a cluster.")]
Claims = Annotated[
    Path | None, typer.Option(help="Directory that holds a directory for each claim; implies --local. Unset: runs/claims.")
]
ClaimPaths = Annotated[list[str] | None, typer.Option(help="NAME=PATH: the directory of one claim; may be repeated.")]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="Name of the job.")]


def cluster_of(context: str | None, namespace: str | None) -> Cluster:
    """Return the cluster and the namespace that a command works in. Raises LocalError."""
    from finetune_cli.cluster.objects import Cluster

    return Cluster(context, namespace)


def first_records(claims: Path | None, claim: list[str] | None) -> FirstRecords | None:
    """Return the first records on this machine; None if no claims are named and the default directory does not exist."""
    places = claims or DEFAULT_CLAIMS
    if claims is None and not claim and not places.is_dir():
        return None
    from finetune_cli.commands.data import FirstRecords
    from finetune_cli.local.claims import parse_claims

    return FirstRecords(places, parse_claims(claim or []), is_given=claims is not None or claim is not None)


@cluster_app.command("list", rich_help_panel=Panel.LOOK)
def list_jobs(
    *,
    namespace: Namespace = None,
    everywhere: Everywhere = False,
    selector: Annotated[str, typer.Option("-l", "--selector", help="Labels, as in kubectl: team=vision,tier!=test.")] = "",
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Afterwards print each job that changes, until Ctrl-C.")] = False,
    context: Context = None,
    output: Form = Output.TEXT,
    local: Local = False,
    claims: Claims = None,
) -> None:
    """List the jobs of a namespace.

    Shows state, stage, step, time left, loss, attempts of training and age.

    Exit codes: 0: done; 2: no usable kubeconfig; 3: the cluster could not be read; 130: interrupted.
    """
    if local or claims is not None:
        local_runs(claims, output)
        return
    from finetune_cli.commands.follow import repeatedly
    from finetune_cli.commands.inspect_jobs import list_changes

    cluster = cluster_of(context, namespace)
    place = "all namespaces" if everywhere else f"the namespace {cluster.namespace}"
    before: dict[str, str] | None = None
    for jobs in repeatedly(lambda: cluster.jobs(everywhere=everywhere, selector=selector), tell, lambda _: not watch):
        answer = list_changes(jobs, before, place, everywhere=everywhere)
        if answer is not None:
            print_answer(output, answer.text, answer.document)
        before = {job.uid: job.resource_version for job in jobs}


@cluster_app.command(rich_help_panel=Panel.LOOK)
def status(
    *,
    name: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Name of the job. Unset: the runs on this machine.")] = None,
    namespace: Namespace = None,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Print again on each change, until the job has ended.")] = False,
    curve: Annotated[
        bool, typer.Option("--curve", help="Draw the loss of all steps; a short-lived pod reads it from the workspace.")
    ] = False,
    checkpoints: Annotated[
        bool,
        typer.Option("--checkpoints", help="List the checkpoints with their losses; the same pod reads them from the workspace."),
    ] = False,
    context: Context = None,
    output: Form = Output.TEXT,
    local: Local = False,
    claims: Claims = None,
) -> None:
    """Show the state of a job and what to do next.

    Shows stages, attempts, progress, loss, time left, the last checkpoint, and what the job waits for. Without a JOB, or with
    --local or --claims, it shows the runs on this machine.

    Exit codes: 0: done; 2: no such job or no usable kubeconfig; 3: the cluster could not be read; 130: interrupted.
    """
    if local or claims is not None or name is None:
        local_runs(claims, output, name, namespace)
        return
    from finetune_cli.commands.follow import repeatedly
    from finetune_cli.commands.inspect_jobs import status_answer

    cluster = cluster_of(context, namespace)
    stored = None
    if curve or checkpoints:
        from finetune_cli.cluster.reader_pod import read_workspace
        from finetune_cli.jobs.stored_run import CHECKPOINTS, HISTORY, stored_run

        with closing(read_workspace(cluster, cluster.job(name), [HISTORY, CHECKPOINTS])) as printed:
            stored = stored_run(printed)
    if stored is not None and stored.is_cut:
        tell("the history is long: only the losses at its end were read")
    losses = list(stored.losses) if stored is not None and curve else []
    saved = stored.checkpoints if stored is not None and checkpoints else None
    before: str | None = None
    for job in repeatedly(lambda: cluster.job(name), tell, lambda job: not watch or (job is not None and job.has_ended)):
        if job.resource_version != before:
            before = job.resource_version
            answer = status_answer(job, losses, saved, is_watched=watch)
            print_answer(output, answer.text, answer.document)


def local_runs(claims: Path | None, output: Output, name: str | None = None, namespace: str | None = None) -> None:
    """Print the runs on this machine, or only those with the given name."""
    from finetune_cli.local.known_runs import known_runs, named_runs
    from finetune_cli.render.known_runs import runs_document, runs_text

    place = claims or DEFAULT_CLAIMS
    runs = known_runs(place) if name is None else named_runs(place, name, namespace)
    print_answer(output, lambda: runs_text(runs, place), lambda: runs_document(runs))


@cluster_app.command(rich_help_panel=Panel.LOOK)
def logs(
    *,
    name: JobName,
    namespace: Namespace = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Print new lines until the pods or the run have ended.")] = False,
    stage: Annotated[Role | None, typer.Option(help="Stage. Unset: the current one, or the latest that has logs.")] = None,
    attempt: Annotated[int | None, typer.Option(min=0, help="Attempt of the stage. Unset: the latest.")] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Rank of training, from 0. Unset: all.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only logs of what has failed.")] = False,
    since: Annotated[str | None, typer.Option(help="Only lines of the last 90s, 10m or 1h30m.")] = None,
    tail: Annotated[int | None, typer.Option(min=1, help="Number of lines of each pod or rank, from the end.")] = None,
    context: Context = None,
    local: Local = False,
    claims: Claims = None,
) -> None:
    """Print the logs of a job.

    Logs of training pods that are gone are read from the workspace by a short-lived pod, with the image and user of
    the job's own pods. The workspace keeps the newest 8 to 16 MiB of each rank.

    Exit codes: 0: done; 2: no such job or wrong arguments; 3: there is no such log; 130: interrupted.
    """
    from finetune_cli.jobs.pod_logs import LogRequest

    seconds = None if since is None else int(parse_duration(since, "--since"))
    request = LogRequest(stage, attempt, rank, failed, follow, seconds, tail)
    if local or claims is not None:
        from finetune_cli.commands.local_logs import local_log_lines
        from finetune_cli.local.known_runs import named_runs

        if since is not None:
            raise LocalError("--since: the logs of a run on this machine have no times; use --tail")
        run, *others = named_runs(claims or DEFAULT_CLAIMS, name, namespace)
        if others:
            places = ", ".join(sorted(known.plan.job.namespace for known in (run, *others)))
            raise LocalError(f"{name}: there is a run of that name in several namespaces ({places}); choose one with --namespace")
        for line in local_log_lines(run, request):
            typer.echo(line)
        return
    from finetune_cli.commands.logs import log_lines

    for line in log_lines(cluster_of(context, namespace), name, request):
        typer.echo(line)


@cluster_app.command(rich_help_panel=Panel.LOOK)
def wait(
    *,
    name: JobName,
    namespace: Namespace = None,
    condition: Annotated[
        str, typer.Option("--for", help="Condition to wait for, such as Trained; condition=Trained is the same.")
    ] = "Finished",
    timeout: Annotated[str, typer.Option(help="How long to wait: 90s, 10m, 1h30m or 2d.")] = "1d",
    context: Context = None,
    output: Form = Output.TEXT,
) -> None:
    """Wait until a job has finished or has a condition.

    Exit codes: 0: the job has the condition; 1: it failed, was deleted, or needs a person; 2: wrong arguments or no such job;
    3: the time ran out, or the cluster could not be read; 130: interrupted.
    """
    from finetune_cli.commands.follow import wait_for, wanted_condition
    from finetune_cli.commands.inspect_jobs import utc_now
    from finetune_cli.jobs.diagnosis import diagnose
    from finetune_cli.render.job_status import status_document, waited_text

    wanted, seconds = wanted_condition(condition), parse_duration(timeout, "--timeout")
    code, job = wait_for(cluster_of(context, namespace), name, wanted, seconds, tell)
    now = utc_now()
    print_answer(
        output,
        lambda: waited_text(name, job, wanted, code, seconds),
        lambda: {"exitCode": int(code), "job": None if job is None else status_document(job, diagnose(job, now), now)},
    )
    raise typer.Exit(code)


@cluster_app.command(rich_help_panel=Panel.LOOK)
def cost(
    *,
    by: Annotated[str, typer.Option(help="Group by team, namespace, profile, method, or label:KEY of the jobs.")] = "team",
    namespace: Namespace = None,
    everywhere: Everywhere = False,
    context: Context = None,
    output: Form = Output.TEXT,
) -> None:
    """Show GPU hours and their price.

    Adds up the hours that the statuses of the existing jobs have counted.

    Exit codes: 0: done; 2: wrong arguments or no usable kubeconfig; 3: the cluster could not be read.
    """
    from finetune_cli.commands.cost import bill, bill_document, bill_text
    from finetune_cli.commands.inspect_jobs import utc_now

    account = bill(cluster_of(context, namespace), by, utc_now(), everywhere=everywhere)
    print_answer(output, lambda: bill_text(account), lambda: bill_document(account))


def explain_job(name: str, context: str | None, namespace: str | None, output: Output) -> None:
    """Print what is wrong with a job."""
    from finetune_cli.commands.diagnose_job import examine

    answer = examine(cluster_of(context, namespace), name)
    print_answer(output, answer.text, answer.document)

"""The verbs that make manifests and change the jobs of a cluster."""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finetune_cli.answers import Output, Panel, print_answer, read_text, signs_of_life, tell
from finetune_cli.cluster_verbs import ClaimPaths, Context, Form, JobName, Namespace, cluster_of, first_records, status
from finetune_cli.exit_codes import ExitCode
from finetune_cli.jobs.durations import parse_duration
from finetune_job.reasons import ConditionType

if TYPE_CHECKING:
    from finetune_cli.commands.change_jobs import Change

change_app = typer.Typer()
NewName = Annotated[str | None, typer.Option("--name", help="Name of the new job. Unset: the first of JOB-2, JOB-3, ...")]


class RecordFormat(StrEnum):
    """The values of DataFormat, repeated here because importing that module is slow."""

    CHAT = "Chat"
    PROMPT_COMPLETION = "PromptCompletion"
    TEXT = "Text"


@change_app.command(rich_help_panel=Panel.TRAIN)
def submit(
    *,
    file: Annotated[str, typer.Argument(help="Manifest with FineTuneJobs; - for standard input.")],
    namespace: Namespace = None,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Afterwards show changes until the job has ended.")] = False,
    context: Context = None,
    output: Form = Output.TEXT,
) -> None:
    """Check a manifest and create its jobs.

    Nothing is created if one of them is refused.

    Exit codes: 0: created (with --watch: and succeeded); 1: refused (with --watch: or failed); 2: unusable input or no usable
    kubeconfig; 3: the API server rejected the request; 130: interrupted.
    """
    from finetune_cli.commands.change_jobs import submit as submit_jobs
    from finetune_cli.render.verdicts import report_document, report_text

    report, made = submit_jobs(cluster_of(context, namespace), read_text(file), file, namespace, is_watched=watch)
    if not made:
        print_answer(output, lambda: report_text(report), lambda: report_document(report))
        raise typer.Exit(report.exit_code)
    typer.echo(report_text(report), nl=False, err=True)
    if not watch:
        print_answer(output, lambda: "".join(each.text() for each in made), lambda: {"jobs": [each.document() for each in made]})
        return
    typer.echo(made[0].text(), nl=False)
    raise typer.Exit(_watched(made[0], context, output))


def _watched(change: Change, context: str | None, output: Output) -> ExitCode:
    from finetune_cli.commands.follow import outcome

    status(name=change.job.name, namespace=change.job.namespace, watch=True, context=context, output=output)
    ended = cluster_of(context, change.job.namespace).job(change.job.name)
    code = outcome(ended, ConditionType.FINISHED)
    return ExitCode.FAILED if code is None else code


@change_app.command(rich_help_panel=Panel.CHANGE)
def suspend(*, name: JobName, namespace: Namespace = None, context: Context = None, output: Form = Output.TEXT) -> None:
    """Stop a job's pods and keep its checkpoint.

    Exit codes: 0: done; 1: the job has ended; 2: no such job or no usable kubeconfig; 3: the API server rejected the request.
    """
    from finetune_cli.commands.change_jobs import set_suspended

    _print(set_suspended(cluster_of(context, namespace), name, suspended=True), output)


@change_app.command(rich_help_panel=Panel.CHANGE)
def resume(*, name: JobName, namespace: Namespace = None, context: Context = None, output: Form = Output.TEXT) -> None:
    """Continue a suspended job from its checkpoint.

    Exit codes: 0: done; 1: the job has ended; 2: no such job or no usable kubeconfig; 3: the API server rejected the request.
    """
    from finetune_cli.commands.change_jobs import set_suspended

    _print(set_suspended(cluster_of(context, namespace), name, suspended=False), output)


@change_app.command(rich_help_panel=Panel.CHANGE)
def cancel(
    *,
    name: JobName,
    namespace: Namespace = None,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask for confirmation.")] = False,
    context: Context = None,
    output: Form = Output.TEXT,
) -> None:
    """End a job for good.

    This cannot be undone; `suspend` can.

    Exit codes: 0: done; 1: the job has ended; 2: no such job or no usable kubeconfig; 3: the API server rejected the request;
    130: not confirmed.
    """
    from finetune_cli.commands.change_jobs import cancel as cancel_job

    if not yes and sys.stdin.isatty() and not typer.confirm(f"End {name} for good?", err=True):
        raise typer.Exit(ExitCode.INTERRUPTED)
    _print(cancel_job(cluster_of(context, namespace), name), output)


@change_app.command(rich_help_panel=Panel.CHANGE)
def retry(
    *, name: JobName, new_name: NewName = None, namespace: Namespace = None, context: Context = None, output: Form = Output.TEXT
) -> None:
    """Retry a job.

    A stalled job continues; a failed job is created again with the same spec.

    Exit codes: 0: done; 1: there is nothing to retry; 2: no such job or no usable kubeconfig;
    3: the API server rejected the request.
    """
    from finetune_cli.commands.change_jobs import retry as retry_job

    _print(retry_job(cluster_of(context, namespace), name, new_name), output)


@change_app.command(rich_help_panel=Panel.CHANGE)
def fork(
    *,
    name: JobName,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="PATH=VALUE, as in training.learningRate=1e-4; may be repeated.")
    ] = None,
    start: Annotated[
        str | None, typer.Option("--from", help="Start from a checkpoint of the job: its step, or newest. Unset: the base model.")
    ] = None,
    new_name: NewName = None,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Print the manifest of a changed job.

    The new job has the spec of JOB with your changes, and its own place for results. With --from it begins with the parameters of
    a checkpoint, on the same workspace claim; optimizer and schedule start again.

    Exit codes: 0: the rules accept it; 1: they refuse it; 2: no such job or no usable kubeconfig;
    3: the cluster could not be read.
    """
    from finetune_cli.commands.change_jobs import fork as fork_job
    from finetune_cli.jobs.next_manifest import parse_change
    from finetune_cli.render.verdicts import report_text

    parsed = [parse_change(each) for each in changes or []]
    text, report = fork_job(cluster_of(context, namespace), name, new_name, parsed, start)
    typer.echo(text, nl=False)
    if any(verdict.findings for verdict in report.verdicts):
        typer.echo(report_text(report), nl=False, err=True)
    raise typer.Exit(report.exit_code)


@change_app.command(rich_help_panel=Panel.RESULTS)
def download(
    *,
    name: JobName,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory for the results; created if it does not exist.")],
    namespace: Namespace = None,
    timeout: Annotated[str, typer.Option(help="Time limit of the whole copy: 90s, 10m, 1h30m or 2d.")] = "6h",
    context: Context = None,
    output: Form = Output.TEXT,
) -> None:
    """Copy the results of a job to this machine.

    A pod that exists only during the copy reads them from their claim. Each file is checked against SHA256SUMS. Run the
    command again to continue an interrupted copy.

    Exit codes: 0: all files are here; 1: the results are not complete yet; 2: no such job, or its results are elsewhere;
    3: they could not be read or written; 130: interrupted.
    """
    from finetune_cli.commands.download import Listener
    from finetune_cli.commands.download import download as download_results
    from finetune_cli.local.launch import Interruption

    with signs_of_life("copying the results"), Interruption(stopping="the pod is deleted") as interruption:
        seconds = int(parse_duration(timeout, "--timeout"))
        listener = Listener(tell, lambda: interruption.requested)
        downloaded = download_results(cluster_of(context, namespace), name, directory, seconds, listener)
    print_answer(output, downloaded.text, downloaded.document)


@change_app.command(rich_help_panel=Panel.TRAIN)
def init(
    *,
    model: Annotated[str | None, typer.Option(help="Base model: hf://ORG/NAME, s3://BUCKET/PREFIX or pvc://CLAIM/PATH.")] = None,
    data: Annotated[str | None, typer.Option(help="Training data: an address as for --model, or hf://datasets/ORG/NAME.")] = None,
    revision: Annotated[str | None, typer.Option(help="Commit of a model from the Hub.")] = None,
    data_revision: Annotated[str | None, typer.Option(help="Commit of a data set from the Hub.")] = None,
    devices: Annotated[int | None, typer.Option(min=1, max=64, help="GPUs per node, or CPU ranks.")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1,
    destination: Annotated[str, typer.Option("--output", help="Destination of the results.")] = "pvc://models-out",
    workspace: Annotated[str, typer.Option(help="Claim for checkpoints and prepared data.")] = "workspace",
    profile: Annotated[str | None, typer.Option(help="FineTuneProfile of the cluster. Unset: default.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the job. Unset: derived from the model's name.")] = None,
    record_format: Annotated[
        RecordFormat | None,
        typer.Option(
            "--format",
            help="Format of the records. Unset: detected if the first records are on this machine, else PromptCompletion.",
        ),
    ] = None,
    claims: Annotated[
        Path | None,
        typer.Option(
            help="Directory that holds a directory for each claim; the manifest suits the first records there. "
            "Unset: runs/claims, if it exists."
        ),
    ] = None,
    claim: ClaimPaths = None,
    file: Annotated[Path | None, typer.Option("-f", "--filename", help="File to write. Unset: standard output.")] = None,
) -> None:
    """Write a valid manifest.

    Looks at your data if it is local. On a terminal it asks for what is missing: model, data, devices, and the format of records
    that are elsewhere.

    Exit codes: 0: written; 1: the rules or the first records refuse the input; 2: something is missing, or the file exists.
    """
    from finetune_cli.commands.init import Answers, ask, made_for, manifest_text, unseen, write_new
    from finetune_cli.render.verdicts import report_text

    given = Answers(
        model,
        data,
        revision,
        data_revision,
        devices,
        nodes,
        destination,
        workspace,
        profile,
        name,
        record_format and record_format.value,
    )
    records = first_records(claims, claim)
    answers = ask(given, records, is_terminal=sys.stdin.isatty())
    text, report = manifest_text(answers)
    if report.exit_code is ExitCode.DONE and records is not None:
        text, report, messages = made_for(text, answers, records)
        typer.echo("".join(f"{line}\n" for line in messages), nl=False, err=True)
    if report.exit_code is not ExitCode.DONE:
        typer.echo(report_text(report), nl=False, err=True)
        raise typer.Exit(ExitCode.REFUSED)
    if file is not None:
        write_new(file, text)
    if answers.format is None and unseen(answers, records):
        typer.echo(
            "the records are not on this machine and are assumed to be PromptCompletion; give --format if they are not, or "
            "--claims DIR if they are here",
            err=True,
        )
    if file is None:
        typer.echo(text, nl=False)
        return
    where = [
        *(["--claims", str(claims)] if claims is not None else []),
        *(word for place in claim or [] for word in ("--claim", place)),
    ]
    run = shlex.join(["finetune", "run", str(file), *where])
    typer.echo(f"{file} is written; next: `{run}` on this machine, or `finetune submit {file}`", err=True)


def _print(change: Change, output: Output) -> None:
    print_answer(output, change.text, change.document)

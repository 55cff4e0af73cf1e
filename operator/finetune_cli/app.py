"""`finetune` and `kubectl finetune`: collects all verbs, and defines those that check, estimate and explain.

Each verb reads its input, calls its module in `commands`, prints the answer, and exits. Its imports are inside its function, so
that every verb starts quickly.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]

from finetune_cli.answers import Output, Panel, VerbGroup, manifest_text, print_answer, read_files, read_text, signs_of_life, tell
from finetune_cli.change_verbs import change_app
from finetune_cli.cluster_verbs import (
    DEFAULT_CLAIMS,
    ClaimPaths,
    Context,
    Form,
    Namespace,
    cluster_app,
    explain_job,
    first_records,
)
from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_cli.local_verbs import ClaimsDirectory, local_app
from finetune_memory.devices import known_devices

if TYPE_CHECKING:
    from finetune_cli.checks.validate import Report
    from finetune_cli.commands.data import FirstRecords

app = typer.Typer(
    name="finetune",
    cls=VerbGroup,
    no_args_is_help=True,
    add_completion=False,
    # Help and messages are plain text because they also end up in files and are read by people who set NO_COLOR.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


app.add_typer(local_app)
app.add_typer(cluster_app)
app.add_typer(change_app)
COMPLETION = "_FINETUNE_COMPLETE"
"""Environment variable that a completion script sets to request completions; typer expects this name."""
Filename = Annotated[str | None, typer.Option("-f", "--filename", help="Same as FILE, for users of kubectl.")]


class Shell(StrEnum):
    """Shells for which `completion` can print a script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"finetune {version('finetune-operator')}")
        raise typer.Exit


@app.callback()
def all_verbs(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the release and exit.")
    ] = False,
) -> None:
    """Fine-tune language models with FineTuneJobs, on a cluster or on this machine.

    JOB names a job of the kubeconfig's cluster, or, with --local or --claims, a run on this machine. run, attach and stop work on
    this machine only.
    """


@app.command(rich_help_panel=Panel.OTHER)
def completion(shell: Annotated[Shell, typer.Argument(help="The shell.")]) -> None:
    """Print a completion script for a shell.

    For bash: source <(finetune completion bash)
    """
    typer.echo(get_completion_script(prog_name="finetune", complete_var=COMPLETION, shell=shell.value))


@app.command(rich_help_panel=Panel.TRAIN)
def validate(
    file: Annotated[
        list[str] | None, typer.Argument(help="Manifests with FineTuneJobs: files or directories; - for standard input.")
    ] = None,
    *,
    filename: Annotated[
        list[str] | None, typer.Option("-f", "--filename", help="Same as FILE, for users of kubectl; may be repeated.")
    ] = None,
    output: Form = Output.TEXT,
    profile: Annotated[Path | None, typer.Option(help="Manifest of the FineTuneProfile to judge with.")] = None,
    claims: Annotated[
        Path | None,
        typer.Option(
            help="Directory that holds a directory for each claim; the first records there are also checked. "
            "Unset: runs/claims, if it exists."
        ),
    ] = None,
    claim: ClaimPaths = None,
    fix: Annotated[bool, typer.Option("--fix", help="Print the manifests with all safe fixes applied.")] = False,
) -> None:
    """Check manifests against every rule.

    Also checks the first records if they are on this machine, and with --claims the files of the model.

    Exit codes: 0: accepted; 1: refused; 2: unusable input.

    With --fix the fixed manifests go to standard output, with comments and layout kept, and the list of changes goes to standard
    error. The exit code is that of the fixed manifests.
    """
    from finetune_cli.checks.validate import validate_files
    from finetune_cli.render.verdicts import report_document, report_text

    profile_text = read_text(str(profile)) if profile is not None else None
    files = read_files([*(file or []), *(filename or [])])
    records = first_records(claims, claim)
    if fix:
        if output is not Output.TEXT:
            raise LocalError(f"--output {output} has no effect with --fix, which prints the manifests; leave one of the two out")
        raise typer.Exit(_fix(files, profile_text, records))

    def show(report: Report) -> None:
        print_answer(output, lambda: report_text(report), lambda: report_document(report))

    report = _judged(validate_files(files, profile_text), records, show)
    show(report)
    raise typer.Exit(report.exit_code)


@app.command(rich_help_panel=Panel.TRAIN)
def estimate(
    file: Annotated[str | None, typer.Argument(help="Manifest with one or more FineTuneJobs; - for standard input.")] = None,
    *,
    filename: Filename = None,
    model: Annotated[
        Path | None, typer.Option(help="Directory of the base model, or its config.json; required for hf:// models.")
    ] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="Memory of one device, as in 80Gi. Unset: the profile's.")] = None,
    gpu: Annotated[
        str | None, typer.Option(help=f"Name of the device. Unset: the profile's. Known: {', '.join(known_devices())}.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of one pass over the data; needed to calculate the hours of a run of epochs."),
    ] = None,
    output: Form = Output.TEXT,
    profile: Annotated[Path | None, typer.Option(help="Manifest of the FineTuneProfile to judge with.")] = None,
    claims: ClaimsDirectory = DEFAULT_CLAIMS,
) -> None:
    """Estimate memory and time of a job.

    Shows the memory of each rank, what to change if the job does not fit, and the calculated time.

    Exit codes: 0: it fits, or no limit is known; 1: refused or too large; 2: unusable input.
    """
    from finetune_cli.checks.estimate import EstimateOptions
    from finetune_cli.checks.estimate import estimate as estimate_jobs
    from finetune_cli.render.estimate import estimate_document, estimate_text

    estimates = estimate_jobs(
        manifest_text(file, filename),
        profile=read_text(str(profile)) if profile is not None else None,
        claims=claims,
        options=EstimateOptions(model, gpu_memory, gpu, tokens),
    )
    print_answer(output, lambda: estimate_text(estimates), lambda: estimate_document(estimates))
    raise typer.Exit(ExitCode.DONE if all(job.verdict.fits for job in estimates) else ExitCode.REFUSED)


@app.command(rich_help_panel=Panel.LOOK)
def doctor(
    *,
    namespace: Annotated[str, typer.Option("-n", "--namespace", help="Namespace of the jobs; the network probe runs there.")],
    context: Annotated[str | None, typer.Option(help="Context of the kubeconfig. Unset: the current one.")] = None,
    profile: Annotated[str, typer.Option(help="FineTuneProfile that the jobs will use.")] = "default",
    probe: Annotated[
        bool, typer.Option("--probe/--no-probe", help="Test with two pods whether the network enforces NetworkPolicies.")
    ] = True,
    timeout: Annotated[
        int, typer.Option(min=60, help="Time limit of the two pods in seconds, including pulls of the image.")
    ] = 300,
    output: Form = Output.TEXT,
) -> None:
    """Check whether a cluster is ready for jobs.

    Looks at version, definitions, operator, profile, your permissions, storage, and whether the network isolates runs.

    Exit codes: 0: ready; 1: something is missing; 2: no usable kubeconfig; 3: something could not be read; 130: interrupted.
    """
    from finetune_cli.checks.cluster import exit_code
    from finetune_cli.commands.doctor import doctor_document, doctor_text, examine

    with signs_of_life("looking at the cluster"):
        facts, checks = examine(context=context, namespace=namespace, profile=profile, probe=probe, seconds=timeout)
    print_answer(output, lambda: doctor_text(checks), lambda: doctor_document(facts, checks))
    raise typer.Exit(exit_code(checks))


@app.command(rich_help_panel=Panel.TRAIN)
def data(
    file: Annotated[str | None, typer.Argument(help="Manifest with one FineTuneJob; - for standard input.")] = None,
    *,
    filename: Filename = None,
    claims: ClaimsDirectory = DEFAULT_CLAIMS,
    claim: ClaimPaths = None,
    records: Annotated[int, typer.Option("-n", "--records", min=0, help="Number of records of each source to show.")] = 2,
    first: Annotated[int, typer.Option(min=1, help="Number of records of each source to read and count.")] = 1000,
    output: Form = Output.TEXT,
) -> None:
    """Show the first records as training sees them.

    Renders, counts and measures the records, and marks the trained parts. Reads sources on this machine, including those
    that an earlier run has fetched.

    Exit codes: 0: no objection; 1: refused; 2: unusable input.
    """
    from finetune_cli.checks.validate import Report
    from finetune_cli.commands.data import look_at
    from finetune_cli.local.claims import parse_claims
    from finetune_cli.render.data import look_document, look_text
    from finetune_cli.render.verdicts import report_text

    seen = look_at(manifest_text(file, filename), claims, parse_claims(claim or []), shown=records, limit=first)
    if isinstance(seen, Report):
        typer.echo(report_text(seen), nl=False)
        raise typer.Exit(seen.exit_code)
    # Only a terminal gets colours, so that a file holds no escape codes.
    in_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print_answer(output, lambda: look_text(seen, in_colour=in_colour), lambda: look_document(seen))
    raise typer.Exit(ExitCode.REFUSED if seen.is_refused else ExitCode.DONE)


_JOB_PREFIXES = ("job/", "ftj/", "finetunejob/", "finetunejobs/")


@app.command(rich_help_panel=Panel.LOOK)
def explain(
    word: Annotated[
        str | None,
        typer.Argument(
            help="A finding's id, a failure class, an exit code, a condition or its reason; a field, such as "
            "spec.training.learningRate; or job/NAME, a job of the cluster. Unset: all findings by topic."
        ),
    ] = None,
    namespace: Namespace = None,
    context: Context = None,
    output: Form = Output.TEXT,
) -> None:
    """Explain a finding, failure, condition or field.

    For a job (job/NAME) it shows what is wrong: the reason, the evidence, what to do, and a patch for a new job where settings
    can help. With -n or --context, the word is the name of a job. Without a word it lists all findings.
    """
    if word is not None and (word.startswith(_JOB_PREFIXES) or namespace is not None or context is not None):
        explain_job(word.rpartition("/")[2], context, namespace, output)
        return
    from finetune_cli.commands.explain import explain as find
    from finetune_cli.commands.explain import nearest
    from finetune_cli.render import explanations

    if word is None:
        print_answer(output, explanations.overview_text, explanations.overview_document)
        return
    meanings = find(word)
    if not meanings:
        near = nearest(word)
        suggestion = f"; did you mean {', '.join(near)}?" if near else "; `finetune explain` lists all findings"
        raise LocalError(f"unknown term: {word}{suggestion}")
    print_answer(output, lambda: explanations.explained_text(meanings), lambda: explanations.explained_document(word, meanings))


def _judged(report: Report, records: FirstRecords | None, show: Callable[[Report], None]) -> Report:
    """Add the findings about the first records. If the records cannot be read, show the report as it is and raise LocalError."""
    try:
        return report if records is None else records.judged(report, tell)
    except LocalError:
        show(report)
        raise


def _fix(files: list[tuple[str, str]], profile: str | None, records: FirstRecords | None) -> ExitCode:
    from finetune_cli.checks.fix import fix as fix_files
    from finetune_cli.checks.validate import validate_files
    from finetune_cli.render.verdicts import fixes_text, report_text

    fixed = fix_files(files, profile, None if records is None else records.findings)
    for number, file in enumerate(fixed):
        separator = "---\n" if number and not file.text.startswith("---") else ""
        typer.echo(f"{separator}{file.text}", nl=False)
    typer.echo(fixes_text(fixed), nl=False, err=True)

    def show(report: Report) -> None:
        if report.exit_code is not ExitCode.DONE:
            typer.echo(report_text(report), nl=False, err=True)

    report = _judged(validate_files([(file.name, file.text) for file in fixed], profile), records, show)
    show(report)
    return report.exit_code

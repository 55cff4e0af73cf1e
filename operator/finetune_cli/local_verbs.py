"""The verbs that work on this machine: run, attach, stop, audit, rehearse, merge; and reproduce, also for jobs of a cluster."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from finetune_cli.answers import Output, Panel, print_answer, read_text, signs_of_life
from finetune_cli.cluster_verbs import DEFAULT_CLAIMS, ClaimPaths, Claims, Context, Local, cluster_of
from finetune_cli.exit_codes import LocalError
from finetune_job.api.enumerations import LARGEST_SHARD, Dtype, MergeBase

if TYPE_CHECKING:
    from finetune_cli.commands.change_jobs import Change

local_app = typer.Typer()

ClaimsDirectory = Annotated[Path, typer.Option(help="Directory that holds a directory for each claim.")]
RunNamespace = Annotated[str, typer.Option("-n", "--namespace", help="Namespace in the job's manifest.")]


class BaseForm(StrEnum):
    """The bases that a merge on this machine can add an adapter to."""

    ORIGINAL = MergeBase.ORIGINAL.value
    DEQUANTIZED = MergeBase.DEQUANTIZED.value


@local_app.command(rich_help_panel=Panel.TRAIN)
def run(
    *,
    file: Annotated[str, typer.Argument(help="Manifest with one FineTuneJob; - for standard input.")],
    claims: ClaimsDirectory = DEFAULT_CLAIMS,
    claim: ClaimPaths = None,
    output_dir: Annotated[Path | None, typer.Option(help="Write the results here instead of to output.destination.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Remove the job's workspace and start over.")] = False,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Number of ranks; the result has the same bytes. Requires training.reduction: Ordered."),
    ] = None,
    output: Annotated[
        Output,
        typer.Option("-o", "--output", help="Form of the answer; with json and yaml everything else goes to standard error."),
    ] = Output.TEXT,
) -> None:
    """Run a job on this machine.

    Runs fetch, preflight, training, merge, verification and publication as processes. Run the command again to continue after an
    interruption.

    Exit codes: 0: done; 1: refused; 2: unusable input; 3: failed; 130: interrupted.
    """
    from finetune_cli.commands.run import Options, run_document, run_job, run_text
    from finetune_cli.local.claims import parse_claims

    options = Options(claims=claims, claim_paths=parse_claims(claim or []), output_directory=output_dir, fresh=fresh, ranks=ranks)
    end = run_job(read_text(file), options, Console(highlight=False, stderr=output is not Output.TEXT))
    print_answer(output, lambda: run_text(end), lambda: run_document(end))
    raise typer.Exit(end.exit_code)


@local_app.command(rich_help_panel=Panel.LOOK)
def attach(
    name: Annotated[str, typer.Argument(help="Name of the job.")],
    namespace: RunNamespace = "default",
    claims: ClaimsDirectory = DEFAULT_CLAIMS,
) -> None:
    """Follow a job that runs on this machine.

    Ctrl-C ends only this command.
    """
    from finetune_cli.local.known_runs import attach as follow
    from finetune_cli.local.known_runs import find_run
    from finetune_cli.render.run import LiveView

    run_directory = find_run(claims, name, namespace)
    with LiveView(Console(highlight=False), name) as view:
        follow(run_directory, view)


@local_app.command(rich_help_panel=Panel.CHANGE)
def stop(
    name: Annotated[str, typer.Argument(help="Name of the job.")],
    namespace: RunNamespace = "default",
    claims: ClaimsDirectory = DEFAULT_CLAIMS,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait until it ends.")] = 600,
) -> None:
    """Stop a job that runs on this machine.

    The job saves its state and ends; `finetune run` continues it.

    Exit code: 0: it has ended.
    """
    from finetune_cli.local.known_runs import find_run
    from finetune_cli.local.known_runs import stop as stop_run

    with signs_of_life(f"waiting for {namespace}/{name} to save its state and end"):
        stop_run(find_run(claims, name, namespace), timeout)


@local_app.command(rich_help_panel=Panel.TRAIN)
def rehearse(
    file: Annotated[str, typer.Argument(help="Manifest with one FineTuneJob; - for standard input.")],
    claims: ClaimsDirectory = DEFAULT_CLAIMS,
    claim: ClaimPaths = None,
    timeout: Annotated[float, typer.Option(min=1, help="Time limit in seconds.")] = 300,
) -> None:
    """Rehearse a job on a scaled-down model.

    Trains, kills, resumes, saves, merges and verifies on two CPU ranks, in about a minute. Reads the model's configuration and
    headers, but no weights and no data.

    Exit codes: 0: passed; 1: the job would fail; 2: unusable input; 3: the rehearsal could not finish; 130: interrupted.
    """
    from finetune_cli.commands.rehearse import rehearse_job
    from finetune_cli.commands.run import Options
    from finetune_cli.local.claims import parse_claims

    options = Options(claims=claims, claim_paths=parse_claims(claim or []), output_directory=None, fresh=False)
    code = rehearse_job(read_text(file), options, timeout)
    raise typer.Exit(code)


@local_app.command(rich_help_panel=Panel.RESULTS)
def merge(
    *,
    base: Annotated[Path, typer.Option(help="Directory of the base model.")],
    adapter: Annotated[
        list[Path], typer.Option(help="Directory of an adapter in PEFT's layout; may be repeated, and is merged in this order.")
    ],
    output: Annotated[Path, typer.Option(help="Directory to create for the merged model; it appears only when complete.")],
    dtype: Annotated[Dtype | None, typer.Option(help="Element type of the merged weights. Unset: the base's own.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest weight shard.")] = LARGEST_SHARD,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Compare the result with base and adapter.")] = True,
    prompts: Annotated[Path | None, typer.Option(help="File with a prompt on each line for the comparison of logits.")] = None,
    base_form: Annotated[
        BaseForm,
        typer.Option(help="Base for an adapter of QLoRA or QDoRA: Original, as stored, or Dequantized, as training saw it."),
    ] = BaseForm.ORIGINAL,
    quantization: Annotated[
        str | None,
        typer.Option(
            help="How QLoRA or QDoRA packed the base, as JSON of spec.method.quantization; also used for the comparison."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Device for the comparison of logits, by torch's name.")] = "cpu",
    force: Annotated[bool, typer.Option("--force", help="Merge even an adapter of another base, or without effect.")] = False,
    form: Annotated[
        Output,
        typer.Option("-o", "--form", help="Form of the answer; with json and yaml everything else goes to standard error."),
    ] = Output.TEXT,
) -> None:
    """Merge adapters into a base model.

    Runs on this machine, and its memory does not grow with the model. Run the command again to continue after an interruption.

    Exit codes: 0: done; 1: refused; 2: unusable input; 3: failed; 130: interrupted.
    """
    from finetune_cli.commands.merge import merge as merge_order
    from finetune_cli.commands.merge import merge_document, merge_text
    from finetune_cli.local.programs import MergeOrder

    order = MergeOrder(
        base,
        adapter,
        output,
        dtype.value if dtype else None,
        max_shard_size,
        verify,
        prompts,
        device,
        MergeBase(base_form),
        quantization,
        force,
    )
    end = merge_order(order, Console(highlight=False, stderr=form is not Output.TEXT))
    print_answer(form, lambda: merge_text(end, order), lambda: merge_document(end))
    raise typer.Exit(end.exit_code)


RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="Name of a run on this machine, or its directory in .finetune below the claims.")
]
AnyNamespace = Annotated[str | None, typer.Option("-n", "--namespace", help="Namespace in the job's manifest. Unset: any.")]
ReplayRanks = Annotated[
    int | None, typer.Option(min=1, help="Number of ranks; requires training.reduction: Ordered. Unset: as many as trained last.")
]
AuditForm = Annotated[
    Output, typer.Option("-o", "--output", help="Form of the answer; with json and yaml everything else goes to standard error.")
]


@local_app.command(rich_help_panel=Panel.RESULTS)
def audit(
    *,
    run: RunName,
    intervals: Annotated[
        int, typer.Option(min=1, help="Number of intervals between kept checkpoints to recompute, chosen at random.")
    ] = 3,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, help="Seed of the random choice; the same seed chooses the same intervals. Unset: a different one each time."
        ),
    ] = None,
    ranks: ReplayRanks = None,
    namespace: AnyNamespace = None,
    claims: ClaimsDirectory = DEFAULT_CLAIMS,
    claim: ClaimPaths = None,
    output: AuditForm = Output.TEXT,
) -> None:
    """Check a run by recomputing parts of it.

    Compares all parts of the run by their digests, and recomputes randomly chosen intervals between checkpoints. The run is only
    read.

    Exit codes: 0: nothing differs; 1: something differs; 2: unusable input, or a run with fewer than two checkpoints; 3: it could
    not be recomputed; 130: interrupted.
    """
    from finetune_cli.commands.audit import AuditOrder
    from finetune_cli.commands.audit import audit as audit_run
    from finetune_cli.local.claims import parse_claims
    from finetune_cli.render.audit import audit_document, audit_text

    order = AuditOrder(run, claims, namespace, parse_claims(claim or []), ranks)
    end = audit_run(order, intervals, seed, Console(highlight=False, stderr=output is not Output.TEXT))
    print_answer(output, lambda: audit_text(end), lambda: audit_document(end))
    raise typer.Exit(end.exit_code)


@local_app.command(rich_help_panel=Panel.RESULTS)
def reproduce(
    *,
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB",
            help="Name of a job of the cluster; with --local or --claims, name or directory of a run on this machine.",
        ),
    ],
    wait: Annotated[
        bool,
        typer.Option(
            "--wait", help="Show the progress of the new job until it ends, then compare. Ctrl-C ends only this command."
        ),
    ] = False,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of nodes of the new job, which has as many ranks as the first; requires training.reduction: Ordered. "
            "Unset: the first job's number.",
        ),
    ] = None,
    new_name: Annotated[str | None, typer.Option("--name", help="Name of the new job. Unset: JOB-reproduced.")] = None,
    namespace: Annotated[
        str | None,
        typer.Option("-n", "--namespace", help="Namespace. Unset: the kubeconfig context's; for a run of this machine, any."),
    ] = None,
    context: Context = None,
    local: Local = False,
    claims: Claims = None,
    claim: ClaimPaths = None,
    ranks: ReplayRanks = None,
    output: AuditForm = Output.TEXT,
) -> None:
    """Run a job again and compare the results.

    Runs the plan of the job again from the start, and compares the bytes of the result. A job of the cluster runs again as a new
    job that publishes nothing; call the command again to compare. A run of this machine (--local, --claims, --claim, --ranks, or
    its directory) runs again here, and is only read.

    Exit codes: 0: the same, or the new job was created; 1: different or refused; 2: unusable input; 3: it could not run again, or
    has not ended; 130: interrupted.
    """
    from finetune_cli.local.run_directory import RunDirectory
    from finetune_cli.render.audit import AuditEnd, audit_document, audit_text

    of_machine = {
        "--local": local,
        "--claims": claims is not None,
        "--claim": claim is not None,
        "--ranks": ranks is not None,
        "its directory": RunDirectory(Path(job)).is_there,
    }
    of_cluster = {"--wait": wait, "--nodes": nodes is not None, "--name": new_name is not None, "--context": context is not None}
    here, there = ([name for name, is_given in options.items() if is_given] for options in (of_machine, of_cluster))
    end: Change | AuditEnd
    if here and there:
        raise LocalError(f"{there[0]} is for a job of a cluster, and {here[0]} is for a run of this machine; leave one out")
    if here:
        from finetune_cli.commands.audit import AuditOrder
        from finetune_cli.commands.audit import reproduce as reproduce_run
        from finetune_cli.local.claims import parse_claims

        order = AuditOrder(job, claims or DEFAULT_CLAIMS, namespace, parse_claims(claim or []), ranks)
        end = reproduce_run(order, Console(highlight=False, stderr=output is not Output.TEXT))
    else:
        from finetune_cli.commands.reproduce_job import reproduce_job

        def tell(message: str) -> None:
            typer.echo(message.rstrip(), err=output is not Output.TEXT)

        end = reproduce_job(cluster_of(context, namespace), job, new_name, nodes, tell, waits=wait)
    if isinstance(end, AuditEnd):
        print_answer(output, lambda: audit_text(end), lambda: audit_document(end))
        raise typer.Exit(end.exit_code)
    print_answer(output, end.text, end.document)

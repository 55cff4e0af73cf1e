"""`finetune` and `kubectl finetune`: the verbs. Each reads its input, calls its module in `commands`, prints, and exits."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from finetune_cli.commands import validate as validate_command
from finetune_cli.commands.explain import explain as explain_rule
from finetune_cli.exit_codes import ExitCode
from finetune_cli.local.claims import parse_claims
from finetune_cli.local.errors import LocalError
from finetune_cli.render.document import as_json, as_yaml, report_document
from finetune_cli.render.text import report_text, rule_text
from finetune_job.api.base import Dtype
from finetune_job.api.output import MergeBase, MergeSpec
from finetune_job.rules.rule import Rule

app = typer.Typer(
    name="finetune", help="Validate, explain and run FineTuneJobs, and merge adapters.", no_args_is_help=True, add_completion=False
)


class Output(StrEnum):
    """Forms of output."""

    TEXT = "text"
    JSON = "json"
    YAML = "yaml"


@app.command()
def validate(
    file: Annotated[str, typer.Option("-f", "--filename", help="Manifest with one or more FineTuneJobs; - for standard input.")],
    output: Annotated[Output, typer.Option("-o", "--output", help="Form of the answer.")] = Output.TEXT,
    profile: Annotated[Path | None, typer.Option(help="Manifest of the FineTuneProfile to judge with.")] = None,
) -> None:
    """Judge a manifest by every rule, without a cluster. Exit code: 0 accepted, 1 refused, 2 unusable input."""
    report = validate_command.validate(_read(file), _read(str(profile)) if profile is not None else None)
    match output:
        case Output.TEXT:
            typer.echo(report_text(report), nl=False)
        case Output.JSON:
            typer.echo(as_json(report_document(report)), nl=False)
        case Output.YAML:
            typer.echo(as_yaml(report_document(report)), nl=False)
    raise typer.Exit(report.exit_code)


@app.command()
def run(
    file: Annotated[str, typer.Argument(help="Manifest with one FineTuneJob; - for standard input.")],
    claims: Annotated[Path, typer.Option(help="Directory that holds a directory for each claim.")] = Path("runs/claims"),
    claim: Annotated[list[str] | None, typer.Option(help="NAME=PATH: the directory of one claim; may be repeated.")] = None,
    output_dir: Annotated[Path | None, typer.Option(help="Write the results here instead of output.destination.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Remove the job's workspace and start anew.")] = False,
) -> None:
    """Run a job as processes of this machine: fetch, preflight, training, merge, verification, publication.

    Run it again to continue after an interruption. Exit code: 0 done, 1 refused, 2 unusable input, 3 failed, 130 interrupted.
    """
    from finetune_cli.commands.run import Options, run_job

    try:
        options = Options(claims=claims, claim_paths=parse_claims(claim or []), output_directory=output_dir, fresh=fresh)
        code = run_job(_read(file), options)
    except LocalError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(error.exit_code) from error
    raise typer.Exit(code)


@app.command()
def merge(
    *,
    base: Annotated[Path, typer.Option(help="Directory of the base model.")],
    adapter: Annotated[list[Path], typer.Option(help="Directory of an adapter in PEFT's layout; repeated: merged in this order.")],
    output: Annotated[Path, typer.Option(help="Directory of the merged model; made, and complete once it exists.")],
    dtype: Annotated[Dtype | None, typer.Option(help="Element type of the merged weights. Unset: the base's own.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest weight shard.")] = MergeSpec().max_shard_size,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Compare the result with base and adapter.")] = True,
    prompts: Annotated[Path | None, typer.Option(help="File with a prompt on each line for the comparison of logits.")] = None,
    base_form: Annotated[
        MergeBase,
        typer.Option(help="What a QLoRA adapter is added to: Original, as stored, or Dequantized, as it saw it in training."),
    ] = MergeBase.ORIGINAL,
    quantization: Annotated[
        str | None,
        typer.Option(help="How a QLoRA training packed its base, as JSON of spec.method.quantization: for the comparison too."),
    ] = None,
    device: Annotated[str, typer.Option(help="Where products of matrices are computed, as torch names it.")] = "cpu",
) -> None:
    """Merge adapters into a base model on this machine, in memory that does not grow with the model.

    Run it again to continue after an interruption. Exit code: 0 done, 1 refused, 2 unusable input, 3 failed, 130 interrupted.
    """
    from finetune_cli.commands.merge import merge as merge_order
    from finetune_cli.local.merge_process import MergeOrder

    order = MergeOrder(
        base,
        adapter,
        output,
        dtype.value if dtype else None,
        max_shard_size,
        verify,
        prompts,
        device,
        base_form,
        quantization,
    )
    try:
        code = merge_order(order)
    except LocalError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(error.exit_code) from error
    raise typer.Exit(code)


@app.command()
def explain(rule: Annotated[str, typer.Argument(help="Id of a rule, as findings name it.")]) -> None:
    """Show what a rule refuses or warns of, and on what evidence."""
    found = explain_rule(rule)
    if isinstance(found, Rule):
        typer.echo(rule_text(found), nl=False)
        return
    typer.echo(f"there is no rule {rule}" + (f"; did you mean {', '.join(found)}?" if found else ""), err=True)
    raise typer.Exit(ExitCode.UNUSABLE)


def _read(file: str) -> str:
    try:
        return sys.stdin.buffer.read().decode() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        typer.echo(f"{file}: cannot be read ({error}); give a file in UTF-8, or - for standard input", err=True)
        raise typer.Exit(ExitCode.UNUSABLE) from error


def main() -> None:
    """Entry point of `finetune` and `kubectl-finetune`."""
    app()


if __name__ == "__main__":
    main()

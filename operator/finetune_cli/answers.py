"""How every verb answers: its errors in one message, its result as text, JSON or YAML."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import typer

from finetune_cli.exit_codes import ExitCode, LocalError


class Output(StrEnum):
    """Forms of output."""

    TEXT = "text"
    JSON = "json"
    YAML = "yaml"


@contextmanager
def reported_errors() -> Iterator[None]:
    """Print an error of a command as one message, and end it with the error's exit code; Ctrl-C ends it silently."""
    try:
        yield
    except LocalError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(error.exit_code) from error
    except BrokenPipeError:
        # Who read the answers has gone: typer ends without a word.
        raise
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        typer.echo(f"{place}{error.strerror or error}; check the path, your rights and the room on the disk", err=True)
        raise typer.Exit(ExitCode.FAILED) from error
    except RecursionError as error:
        typer.echo("the input is nested too deeply", err=True)
        raise typer.Exit(ExitCode.FAILED) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(ExitCode.INTERRUPTED) from error


@contextmanager
def signs_of_life(doing: str) -> Iterator[None]:
    """Say on standard error, every half minute, that this is still being done."""
    from finetune_cli.render.signs_of_life import SignsOfLife

    with SignsOfLife(lambda line: typer.echo(line, err=True)) as signs:
        signs.doing(doing)
        yield


def print_answer(output: Output, text: Callable[[], str], document: Callable[[], Any]) -> None:
    """Print the answer in the form that was asked for."""
    from finetune_cli.render.verdicts import as_json, as_yaml

    match output:
        case Output.TEXT:
            typer.echo(text(), nl=False)
        case Output.JSON:
            typer.echo(as_json(document()), nl=False)
        case Output.YAML:
            typer.echo(as_yaml(document()), nl=False)


def manifest_text(argument: str | None, option: str | None) -> str:
    """Return the text of the one manifest that is named as argument or with -f; end the command if there is not exactly one."""
    from finetune_cli.inputs import InputError, one_file

    try:
        file = one_file(argument, option)
    except InputError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(ExitCode.UNUSABLE) from error
    return text_of(file)


def text_of(file: str) -> str:
    """Return the text of a file, or of standard input (`-`); end the command with a message if it cannot be read."""
    from finetune_cli.inputs import InputError, read_text

    try:
        return read_text(file)
    except InputError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(ExitCode.UNUSABLE) from error

"""Code that all verbs share: groups them in the help, reads manifests, reports errors, prints answers as text, JSON or YAML."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_cli.render.signs_of_life import SignsOfLife

STANDARD_INPUT = "-"
SUFFIXES = (".yaml", ".yml", ".json")
"""Suffixes of the files that are read from a directory; kubectl reads the same ones."""
_NONE = "no manifest is given; name a FILE, or - for standard input"


class Output(StrEnum):
    """Formats in which an answer can be printed."""

    TEXT = "text"
    JSON = "json"
    YAML = "yaml"


class Panel(StrEnum):
    """Titles of the groups of verbs, in the order in which the help shows them."""

    TRAIN = "Train"
    LOOK = "Look"
    CHANGE = "Change"
    RESULTS = "Results"
    OTHER = "Other"


class VerbGroup(TyperGroup):
    """The group of all verbs; prints their help in panels, and each error as a single message.

    Typer prints panels only with rich, which adds borders and emphasis. Help also ends up in files and is read by people who
    set NO_COLOR, so this class prints the panels as plain text.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the verb that the command line names."""
        with reported_errors():
            return super().invoke(ctx)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each panel that has commands."""
        commands: list[Any] = [self.get_command(ctx, name) for name in self.list_commands(ctx)]
        width = formatter.width - 6 - max((len(command.name) for command in commands), default=0)
        for panel in Panel:
            rows = [
                (command.name, command.get_short_help_str(width))
                for command in commands
                if command.rich_help_panel == panel and not command.hidden
            ]
            if rows:
                with formatter.section(panel):
                    formatter.write_dl(rows)


@contextmanager
def reported_errors() -> Iterator[None]:
    """Print an error of a command as one message, and exit with the error's exit code; exit silently on Ctrl-C."""
    try:
        yield
    except LocalError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(error.exit_code) from error
    except BrokenPipeError:
        # The program that reads our output has exited; typer then exits silently too.
        raise
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        typer.echo(f"{place}{error.strerror or error}; check the path, your permissions and the free disk space", err=True)
        raise typer.Exit(ExitCode.FAILED) from error
    except RecursionError as error:
        typer.echo("the input is nested too deeply", err=True)
        raise typer.Exit(ExitCode.FAILED) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(ExitCode.INTERRUPTED) from error


def tell(message: str) -> None:
    """Print a message to standard error."""
    typer.echo(message, err=True)


@contextmanager
def signs_of_life(doing: str) -> Iterator[None]:
    """Print to standard error, every half minute, what the command is still doing."""
    with SignsOfLife(tell) as signs:
        signs.doing(doing)
        yield


def print_answer(output: Output, text: Callable[[], str], document: Callable[[], Any]) -> None:
    """Print the answer in the requested form."""
    from finetune_cli.render.verdicts import as_json, as_yaml

    match output:
        case Output.TEXT:
            typer.echo(text(), nl=False)
        case Output.JSON:
            typer.echo(as_json(document()), nl=False)
        case Output.YAML:
            typer.echo(as_yaml(document()), nl=False)


def read_text(name: str) -> str:
    """Return the text of a file, or of standard input (`-`). Raises LocalError."""
    from finetune_cli.documents import MAX_FILE_BYTES

    try:
        # One byte beyond the limit is enough to recognise a file that is too large, so the rest is not read.
        if name == STANDARD_INPUT:
            return sys.stdin.buffer.read(MAX_FILE_BYTES + 1).decode()
        with Path(name).open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise LocalError(f"{name} cannot be read ({reason}); give a file in UTF-8, or - for standard input") from error


def manifest_text(argument: str | None, option: str | None) -> str:
    """Return the text of the one manifest that the argument or -f names. Raises LocalError."""
    named = [name for name in (argument, option) if name is not None]
    if not named:
        raise LocalError(_NONE)
    if len(named) > 1:
        raise LocalError(f"{argument} and -f {option} are two manifests; give one of them")
    return read_text(named[0])


def read_files(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the name and text of every file; a directory's files are sorted. Raises LocalError, also if there are none."""
    if not names:
        raise LocalError(_NONE)
    files: list[str] = []
    for name in names:
        directory = Path(name)
        if name == STANDARD_INPUT or not directory.is_dir():
            files.append(name)
            continue
        inside = sorted(str(path) for path in directory.iterdir() if path.suffix in SUFFIXES and path.is_file())
        if not inside:
            raise LocalError(f"{name} holds no {', '.join(SUFFIXES)}; give a file or a directory of manifests")
        files += inside
    return [(file, read_text(file)) for file in files]

"""Runs the programs that build images."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_SHOWN_LINES = 40


class ImageError(RuntimeError):
    """An image cannot be built or read; the message says why and what to do."""


def run(*command: str | Path, environment: Mapping[str, str] | None = None, text: str | None = None) -> str:
    """Run a program in the directory `/` and return its standard output.

    Args:
        command: Program and arguments; paths must be absolute.
        environment: Variables to set on top of this process's.
        text: Standard input.

    Raises:
        ImageError: the program is not installed, or ended with a status other than 0.
    """
    program = str(command[0])
    if shutil.which(program) is None:
        raise ImageError(f"the program '{program}' is not on PATH: install it (Debian's package of the same name)")
    done = subprocess.run(
        [str(part) for part in command],
        cwd="/",
        env={**os.environ, **(environment or {})},
        input=text,
        stdin=subprocess.DEVNULL if text is None else None,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        output = "\n".join((done.stdout + done.stderr).splitlines()[-_SHOWN_LINES:])
        raise ImageError(f"'{' '.join(str(part) for part in command)}' ended with status {done.returncode}:\n{output}")
    return done.stdout


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Report on standard error that `what` begins, and how long it took."""
    started = time.monotonic()
    say(what)
    yield
    say(f"{what}: {time.monotonic() - started:.0f} s")


def say(text: str) -> None:
    """Write a line about the work to standard error."""
    print(f"images: {text}", file=sys.stderr, flush=True)

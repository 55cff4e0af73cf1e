"""Entry point of `finetune`, `kubectl finetune` and `python -m finetune_cli`."""

import atexit
import gc
import os
import sys
from typing import TYPE_CHECKING

from finetune_job.plugins import leave_out_plugins

if TYPE_CHECKING:
    from typer import Typer

NEW_OBJECTS = 50_000
"""Allocations between two runs of the garbage collector."""


def main() -> None:
    """Run the verb that the command line names."""
    leave_out_plugins()
    # What is loaded lives as long as the process: collections would go through it in vain, while it is loaded and at the end.
    gc.disable()
    from finetune_cli.app import COMPLETION, app

    gc.freeze()
    # The verb loads as much again, and that, too, is not gone through at the end.
    gc.set_threshold(NEW_OBJECTS)
    atexit.register(gc.freeze)
    gc.enable()
    if COMPLETION in os.environ:
        # Typer does it only for programs with its own two options for this, which would be there twice.
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()
    else:
        _keep_only(app, sys.argv[1] if len(sys.argv) > 1 else "")
    app()


def _keep_only(app: "Typer", verb: str) -> None:
    """Leave out all other verbs if there is this one: typer reads the signatures of all that are registered."""
    parts = [app, *(group.typer_instance for group in app.registered_groups if group.typer_instance)]
    kept = {
        id(part): [each for each in part.registered_commands if verb == (each.name or getattr(each.callback, "__name__", ""))]
        for part in parts
    }
    if any(kept.values()):
        for part in parts:
            part.registered_commands[:] = kept[id(part)]
        app.registered_groups[:] = [group for group in app.registered_groups if kept[id(group.typer_instance)]]


if __name__ == "__main__":
    main()

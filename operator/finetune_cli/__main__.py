"""Entry point of `finetune`, `kubectl finetune` and `python -m finetune_cli`."""

import os

from typer.completion import completion_init  # type: ignore[attr-defined]

from finetune_cli.app import COMPLETION, app


def main() -> None:
    """Run the verb that the command line names."""
    if COMPLETION in os.environ:
        # Typer calls this itself only if its two built-in completion options are enabled, which is not so here.
        completion_init()
    app()


if __name__ == "__main__":
    main()

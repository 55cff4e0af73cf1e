"""Entry point of `finetune`, `kubectl finetune` and `python -m finetune_cli`: loads the verbs quickly, and hands over to them."""

import gc
import os


def main() -> None:
    """Run the verb that the command line names."""
    # Looking for plugins of pydantic reads the metadata of every installed distribution; nothing here has use for one.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    # What is loaded lives as long as the process: collections would go through it in vain, while it is loaded and at the end.
    gc.disable()
    from finetune_cli.app import COMPLETION, app

    gc.freeze()
    gc.enable()
    if COMPLETION in os.environ:
        # Typer does it only for programs with its own two options for this, which would be there twice.
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()
    app()


if __name__ == "__main__":
    main()

"""Whether the trainer can run here: the command line needs it for local work and never imports it."""

from __future__ import annotations

import importlib.util

from finetune_cli.local.errors import LocalError

_NEEDED = ("finetune_trainer", "torch")


def check_trainer() -> None:
    """Raises LocalError where the trainer is not installed."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise LocalError(
            f"{missing[0]} is not installed, and this command computes on this machine; install finetune-operator[trainer,cli]"
        )

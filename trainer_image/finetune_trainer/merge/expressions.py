"""A check that matching an adapter's regular expressions ends, in a bounded process, before anything else uses them.

An adapter may come from anywhere, and a few characters, such as `(.*)*x`, keep a processor busy for years. Names without special
characters, as most adapters have, are not tried.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from finetune_job.module_expressions import key_expression
from finetune_trainer.processes.child import Child, start_answering, wait_for_answer
from finetune_trainer.processes.sandbox import DATA_BYTES
from finetune_trainer.weights.errors import UnsupportedAdapterError

CPU_SECONDS = 20
"""Bound for all expressions of a field on all modules. Legitimate ones take milliseconds."""
WALL_SECONDS = 600.0
"""Wall-clock bound, for a machine that gives a process a thirtieth of a CPU."""
_PLAIN = re.compile(r"[\w.\-/]*")
_SHOWN = 80


def require_expressions_that_end(config: Mapping[str, Any], modules: Collection[str]) -> None:
    """Match all expressions within bounds. modules: names inside the base model.

    Raises UnsupportedAdapterError naming the field of adapter_config.json. An invalid expression fails where it is used.
    """
    for field, written, expressions in _expressions(config):
        end = wait_for_answer(_trial(expressions, modules), WALL_SECONDS)
        if not end.has_answered:
            raise UnsupportedAdapterError(
                f"adapter_config.json: {field} is {written[:_SHOWN]!r}: matching it against the names of {len(modules)} modules "
                f"takes more than {CPU_SECONDS} s of CPU time, or more than {DATA_BYTES >> 30} GiB of memory. Write names of "
                "modules there, as the adapter's tensors have them."
            )


def _trial(expressions: Collection[str], modules: Collection[str]) -> Child:
    """Start the trial as a program, because a merge has threads."""
    order = {"parent": os.getpid(), "seconds": CPU_SECONDS, "expressions": [*expressions], "modules": [*modules]}
    command = [sys.executable, "-m", "finetune_trainer.merge.expression_trial"]
    return start_answering(command, os.environ, json.dumps(order).encode(), 1)


def _expressions(config: Mapping[str, Any]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield each field, its value, and the expressions that PEFT makes from it."""
    for field in ("target_modules", "exclude_modules", "feedforward_modules"):
        value = config.get(field)
        if isinstance(value, str) and not _PLAIN.fullmatch(value):
            yield field, value, [value]
    forms: dict[str, Callable[[str], str]] = {
        "rank_pattern": key_expression,
        "alpha_pattern": key_expression,
        "modules_to_save": lambda name: rf"(^|.*\.){name}($|\..*)",
        "layers_pattern": lambda name: rf"(?:^|.*?\.){name}\.(?P<number>\d+)\.",
    }
    for field, form in forms.items():
        value = config.get(field)
        names = [value] if isinstance(value, str) else value if isinstance(value, list | Mapping) else ()
        special = [name for name in names if isinstance(name, str) and not _PLAIN.fullmatch(name)]
        if special:
            yield field, special[0], [form(name) for name in special]

"""Matches an adapter's regular expressions in a process with limits before anything else uses them, as matching may never end.

The process runs this module as a program. Its standard input is `{"parent": PID, "seconds": N, "expressions": [...],
"modules": [...]}`, and it exits with 0 once all expressions are matched.

The author of an adapter may be unknown, and a few characters such as `(.*)*x` can keep a processor busy for years. Plain names
without special characters, the usual case, need no check.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from finetune_job.module_expressions import key_expression
from finetune_trainer.processes.child import start_answering, wait_for_answer
from finetune_trainer.processes.sandbox import DATA_BYTES, limit_this_process
from finetune_trainer.processes.start import die_with, end
from finetune_trainer.weights.errors import UnsupportedAdapterError

CPU_SECONDS = 20
"""CPU time allowed for matching all expressions of a field against all modules. Ordinary expressions take milliseconds."""
WALL_SECONDS = 600.0
"""Wall-clock time allowed for the same matching. It suffices even if the process gets only a thirtieth of a CPU."""
_PLAIN = re.compile(r"[\w.\-/]*")
_SHOWN = 80


def require_expressions_that_end(config: Mapping[str, Any], modules: Collection[str]) -> None:
    """Match all expressions within limits. modules: names of the base model's modules.

    Raises UnsupportedAdapterError, which names the field of adapter_config.json. Invalid expressions fail later, where they are
    used.
    """
    for field, written, expressions in _expressions(config):
        request = {"parent": os.getpid(), "seconds": CPU_SECONDS, "expressions": expressions, "modules": [*modules]}
        # A program is started instead of a fork, because a merge has several threads.
        command = [sys.executable, "-m", "finetune_trainer.merge.expressions"]
        outcome = wait_for_answer(start_answering(command, os.environ, json.dumps(request).encode(), 1), WALL_SECONDS)
        if not outcome.has_answered:
            raise UnsupportedAdapterError(
                f"adapter_config.json: {field} is {written[:_SHOWN]!r}: matching it against the names of {len(modules)} modules "
                f"takes more than {CPU_SECONDS} s of CPU time, or more than {DATA_BYTES >> 30} GiB of memory. List the modules "
                "by the names that they have in the adapter's tensors."
            )


def _expressions(config: Mapping[str, Any]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield each field, its value, and the expressions that PEFT builds from the value."""
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


def main() -> int:
    request = json.load(sys.stdin)
    die_with(request["parent"])
    limit_this_process(request["seconds"])
    for expression in request["expressions"]:
        try:
            compiled = re.compile(expression)
        except (re.error, RecursionError, OverflowError):
            continue
        for module in request["modules"]:
            compiled.match(module)
            compiled.fullmatch(module)
    return 0


if __name__ == "__main__":
    end(main())

"""`python -m finetune_operator`: run the operator until SIGTERM."""

from __future__ import annotations

import asyncio
import sys
import threading

from kubernetes.aio.config import ConfigException

from finetune_operator.app import run
from finetune_operator.cluster.discovery import CrdsMissingError
from finetune_operator.logs import configure_logs, logger
from finetune_operator.loop_pauses import collect_rarely
from finetune_operator.settings import Timeouts, parse_settings

DEEPEST_OBJECT = 10_000
"""Levels of the deepest object that an API server accepts. Our definition cannot limit the free-form settings of a method, and
one object of one tenant must not end the watch of all."""
FRAMES_PER_LEVEL = 5
STACK_BYTES = 64 << 20
"""Stack size of threads: json's decoder and encoder need about half a kilobyte for each level."""


SWITCH_SECONDS = 0.001
"""Interval after which the interpreter switches threads: those of the lease and the watches share it with the main loop."""


def main() -> int:
    """Run the operator. Returns the exit code."""
    sys.setswitchinterval(SWITCH_SECONDS)
    sys.setrecursionlimit(FRAMES_PER_LEVEL * DEEPEST_OBJECT)
    threading.stack_size(STACK_BYTES)
    collect_rarely()
    settings = parse_settings()
    configure_logs(settings.log_level)
    try:
        return asyncio.run(run(settings, Timeouts()))
    except (CrdsMissingError, ConfigException) as error:
        logger(__name__).error("cannot start", error=str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())

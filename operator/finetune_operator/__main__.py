"""`python -m finetune_operator`: run the operator until SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading

from kubernetes.aio.config import ConfigException

from finetune_operator.app import run
from finetune_operator.client.discovery import CrdsMissingError
from finetune_operator.logs import configure_logs, logger
from finetune_operator.settings import Timeouts, parse_settings

DEEPEST_OBJECT = 10_000
"""Maximum nesting depth of objects that an API server accepts. Our CRD cannot limit the depth of a method's free-form settings,
and one tenant's object must not end the watch for all tenants."""
FRAMES_PER_LEVEL = 5
STACK_BYTES = 64 << 20
"""Stack size of threads: the json module needs about half a kilobyte per nesting level."""


COLLECTOR_THRESHOLDS = (50_000, 10, 10)
"""Number of new container objects after which the youngest generation is collected, and numbers of collections of a generation
after which the next one is too: the oldest after five million containers. Reference counting already frees what the cache
replaces. A collection of the oldest generation finds almost nothing, yet visits every cached object in the middle of a pass: with
the default thresholds, ten thousand objects cost 0.2 s each time."""
SWITCH_SECONDS = 0.001
"""Interval after which the interpreter switches threads: the lease and the watches have threads of their own."""


def main() -> int:
    """Run the operator. Returns the exit code."""
    sys.setswitchinterval(SWITCH_SECONDS)
    sys.setrecursionlimit(FRAMES_PER_LEVEL * DEEPEST_OBJECT)
    threading.stack_size(STACK_BYTES)
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
    settings = parse_settings()
    configure_logs(settings.log_level)
    try:
        return asyncio.run(run(settings, Timeouts()))
    except (CrdsMissingError, ConfigException) as error:
        logger(__name__).error("cannot start", error=str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())

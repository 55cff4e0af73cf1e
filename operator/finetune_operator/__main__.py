"""`python -m finetune_operator`: run the operator until SIGTERM."""

from __future__ import annotations

import asyncio
import sys

from kubernetes.aio.config import ConfigException

from finetune_operator.app import run
from finetune_operator.cluster.discovery import CrdsMissingError
from finetune_operator.logs import configure_logs, logger
from finetune_operator.settings import Clockwork, parse_settings


def main() -> int:
    """Returns the exit code."""
    settings = parse_settings()
    configure_logs(settings.log_level)
    try:
        return asyncio.run(run(settings, Clockwork()))
    except (CrdsMissingError, ConfigException) as error:
        logger(__name__).error("cannot start", error=str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())

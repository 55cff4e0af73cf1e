"""The image is offline by its environment; the roles that copy from and to other places are not."""

from __future__ import annotations

import logging
import os


def go_online() -> None:
    """Let libraries reach the network and keep them from saying where to. Call it before huggingface_hub is imported."""
    os.environ["HF_HUB_OFFLINE"] = "0"
    os.environ.pop("TRANSFORMERS_OFFLINE", None)
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    for name in ("httpx2", "httpcore2", "huggingface_hub"):
        # Addresses to which the Hub sends us on are signed, so whoever reads one may use it; warnings of retries show them.
        logging.getLogger(name).setLevel(logging.ERROR)

"""The process's environment for the network, and how a role goes online.

The image's environment is offline. The object store is the plan's, or on a user's own machine the one that AWS tools would use.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

DEFAULT_REGION = "us-east-1"


def go_online() -> None:
    """Let libraries reach the network, and keep them from logging addresses. Call this before huggingface_hub is imported."""
    os.environ["HF_HUB_OFFLINE"] = "0"
    os.environ.pop("TRANSFORMERS_OFFLINE", None)
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    for name in ("httpx2", "httpcore2", "huggingface_hub"):
        # Addresses to which the Hub redirects are signed, so anyone who reads one may use it; warnings of retries show them.
        logging.getLogger(name).setLevel(logging.ERROR)


@dataclass(frozen=True)
class S3Service:
    """An object store."""

    address: str | None
    """Address of the store; None: that of AWS in this region."""
    region: str


def s3_service(endpoint: str | None, region: str | None) -> S3Service:
    """The plan's object store. None leaves a value to AWS_ENDPOINT_URL and AWS_REGION, which no pod has."""
    return S3Service(
        address=endpoint or os.environ.get("AWS_ENDPOINT_URL") or None,
        region=region or os.environ.get("AWS_REGION") or DEFAULT_REGION,
    )

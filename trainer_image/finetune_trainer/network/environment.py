"""Sets up the process's environment for network access.

In the image, libraries are offline by default. The plan names the object store; on a user's machine, AWS variables may do so.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

DEFAULT_REGION = "us-east-1"


def go_online() -> None:
    """Let libraries access the network, but keep them from logging URLs. Call this before huggingface_hub is imported."""
    os.environ["HF_HUB_OFFLINE"] = "0"
    os.environ.pop("TRANSFORMERS_OFFLINE", None)
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    for name in ("httpx2", "httpcore2", "huggingface_hub"):
        # The Hub redirects to signed URLs, with which anyone can read the file. Warnings about retries would show these URLs.
        logging.getLogger(name).setLevel(logging.ERROR)


@dataclass(frozen=True)
class S3Service:
    """An S3-compatible object store."""

    address: str | None
    """Address of the store; None means AWS in this region."""
    region: str


def s3_service(endpoint: str | None, region: str | None) -> S3Service:
    """Return the object store to use. Values that are None come from AWS_ENDPOINT_URL and AWS_REGION, which are unset in pods."""
    return S3Service(
        address=endpoint or os.environ.get("AWS_ENDPOINT_URL") or None,
        region=region or os.environ.get("AWS_REGION") or DEFAULT_REGION,
    )

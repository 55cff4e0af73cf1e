"""Which object store is meant: the plan's, or on a user's own machine the one that AWS tools would take."""

from __future__ import annotations

import os
from dataclasses import dataclass

DEFAULT_REGION = "us-east-1"


@dataclass(frozen=True)
class S3Service:
    """An object store."""

    address: str | None
    """None: that of AWS in this region."""
    region: str

    @property
    def is_plain_http(self) -> bool:
        return self.address is not None and self.address.startswith("http://")


def s3_service(endpoint: str | None, region: str | None) -> S3Service:
    """What the plan says; None leaves it to AWS_ENDPOINT_URL and AWS_REGION, which no pod has."""
    return S3Service(
        address=endpoint or os.environ.get("AWS_ENDPOINT_URL") or None,
        region=region or os.environ.get("AWS_REGION") or DEFAULT_REGION,
    )

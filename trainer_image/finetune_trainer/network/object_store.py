"""Opens a client for an S3-compatible object store, and interprets the store's failures, for downloads as well as uploads.

boto3 signs requests and reads answers. Only network/retry.py counts failures and waits, so the client itself does not retry.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from boto3.session import Session
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004 - as boto3 names it
    HTTPClientError,
    IncompleteReadError,
    PaginationError,
)
from botocore.parsers import ResponseParserError

from finetune_trainer.network.certificates import untrusted_certificate
from finetune_trainer.network.environment import S3Service
from finetune_trainer.network.http_status import FULL, RETRYABLE, parse_retry_after
from finetune_trainer.network.retry import TransientError

FAILURES = (BotoCoreError, ClientError, ResponseParserError, ValueError, KeyError)
"""Errors of requests to an object store, including those that boto3 and our code raise for malformed answers."""
_CONNECT_SECONDS = 30.0
_ANSWER_SECONDS = 300.0
"""Seconds without any byte after which a request counts as failed: a long time, since a store may first assemble gigabytes."""
_NO_ANSWER = (ConnectionError, HTTPClientError, IncompleteReadError)
_UNREADABLE = (PaginationError, ResponseParserError, ValueError, KeyError)
_FULL_CODES = frozenset({"EntityTooLarge", "QuotaExceeded", "XAmzQuotaExceeded", "XMinioStorageFull", "InsufficientStorage"})
_TRANSIENT_CODES = frozenset(
    {"RequestTimeout", "SlowDown", "InternalError", "OperationAborted", "ConditionalRequestConflict", "BadDigest"}
    | {"XAmzContentSHA256Mismatch"}
)
_CODE = re.compile(r"[A-Za-z]\w{0,63}")


def open_store(service: S3Service, session: Session | None, *, connections: int) -> Any:
    """Return boto3's client of the store. Without a session, requests are not signed, which public buckets allow."""
    config = Config(
        signature_version=None if session is not None else UNSIGNED,
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=_ANSWER_SECONDS,
        retries={"total_max_attempts": 1},
        max_pool_connections=connections,
        # The signature covers each body's SHA-256, which every store checks. Some stores do not support newer checksums.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path", "payload_signing_enabled": True},
    )
    # Trust the authorities that the profile names. By default, boto3 trusts only its own list.
    authorities = os.environ.get("SSL_CERT_FILE")
    return (session or Session()).client(
        "s3", region_name=service.region, endpoint_url=service.address, verify=authorities, config=config
    )


@dataclass(frozen=True)
class StoreRefusal:
    """A final refusal by a store, or by boto3."""

    status: int
    """HTTP status; 0 if the request was not sent."""
    code: str
    """The store's error code. The error message is not kept, because it may contain the text that was signed."""

    @property
    def is_full(self) -> bool:
        """Whether there is no room, or the object is larger than the store accepts."""
        return self.status in FULL or self.code in _FULL_CODES

    @property
    def lacks_credentials(self) -> bool:
        """Whether boto3 found no usable credentials."""
        return self.status == 0 and ("Credential" in self.code or "Token" in self.code)

    def __str__(self) -> str:
        words = [f"HTTP status {self.status}"] if self.status else []
        return ", ".join([*words, *([self.code] if self.code else [])])


def status_of(error: ClientError) -> int:
    """Return the HTTP status of an answer; 0 if there is none."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def refusal(error: Exception) -> StoreRefusal:
    """Return the refusal by a store, or by boto3 before it sent anything. Raises TransientError if trying again may help."""
    kind = type(error).__name__
    if isinstance(error, _NO_ANSWER):
        raise untrusted_certificate(error) or TransientError(f"the object store did not answer ({kind})") from None
    if isinstance(error, _UNREADABLE):
        raise TransientError(f"the answer of the object store cannot be read ({kind})") from None
    if not isinstance(error, ClientError):
        return StoreRefusal(0, kind)
    answer, code = error.response.get("ResponseMetadata", {}), str(error.response.get("Error", {}).get("Code", ""))
    refused = StoreRefusal(status_of(error), code if _CODE.fullmatch(code) else "")
    if not refused.is_full and (refused.status in RETRYABLE or refused.code in _TRANSIENT_CODES):
        pause = parse_retry_after(answer.get("HTTPHeaders", {}).get("retry-after"))
        raise TransientError(f"the object store is busy or broken ({refused})", pause) from None
    return refused

"""Interprets the Hub's responses, for downloads as well as uploads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TypeVar

import httpx2
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

from finetune_trainer.network.certificates import untrusted_certificate
from finetune_trainer.network.http_status import DENIED, RETRYABLE, parse_retry_after
from finetune_trainer.network.retry import TransientError

T = TypeVar("T")

SILENCE_SECONDS = 60.0
"""Number of seconds without any byte after which a request counts as failed."""
_ADDRESS = re.compile(r"\w+://\S+")
_LONGEST_REASON = 300


def transient_failure(response: httpx2.Response, endpoint: str) -> TransientError | None:
    """Return the failure of a request that may succeed if it is repeated; None if repeating it will not help."""
    hub, url = httpx2.URL(endpoint), response.url
    elsewhere = (url.host, url.port) != (hub.host, hub.port)
    if response.status_code in RETRYABLE or (elsewhere and response.status_code in DENIED):
        # The Hub redirects to a signed address. If that address is refused, it has expired, and the next one will be valid. The
        # server may ask for a pause with Retry-After or with the Hub's RateLimit header.
        text, limit = response.headers.get("Retry-After"), parse_ratelimit_headers(response.headers)
        pause = parse_retry_after(text)
        if not text and limit is not None and limit.remaining == 0:
            pause = float(limit.reset_in_seconds)
        return TransientError(f"HTTP status {response.status_code}", pause)
    return None


def redacted_message(text: str | None) -> str:
    """Return the Hub's reason for a refusal without any addresses, since these may be signed; empty if there is no reason."""
    plain = " ".join(_ADDRESS.sub("(address)", text or "").split())
    return f": {plain[:_LONGEST_REASON]}" if plain else ""


def call_hub(operation: Callable[[], T]) -> T:
    """Call huggingface_hub and return the result. Raises HfHubHTTPError, or TransientError if there is no complete answer."""
    try:
        return operation()
    except (RuntimeError, ValueError, httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise _error_for(error) from None


def _error_for(error: BaseException) -> BaseException:
    """Return the error to raise instead. A connection error's text may hold a signed address, so only its type is kept."""
    if isinstance(error, HfHubHTTPError):
        return error
    if isinstance(error, json.JSONDecodeError):
        return TransientError("the answer is not JSON")
    if isinstance(error, httpx2.HTTPError | httpx2.InvalidURL | httpx2.StreamError):
        return untrusted_certificate(error) or TransientError(f"no answer ({type(error).__name__})")
    if isinstance(error, RuntimeError) and error.__cause__ is not None:
        # huggingface_hub wraps errors that its threads raise.
        return _error_for(error.__cause__)
    return error

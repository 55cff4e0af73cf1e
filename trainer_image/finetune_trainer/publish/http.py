"""Requests to a destination: bodies are sent in small pieces, so that they can be stopped, and failures do not show what was
sent.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import httpx2

from finetune_trainer.network.certificates import untrusted_certificate
from finetune_trainer.network.http_status import RETRYABLE, parse_retry_after
from finetune_trainer.network.retry import StoppedError, TransientError

SILENCE_SECONDS = 60.0
"""Longest time without a byte before a request counts as failed."""
ANSWER_SECONDS = 300.0
"""Time for an answer: object stores and registries first assemble or hash gigabytes."""
MOST_ANSWER_BYTES = 64 << 20
"""Largest body of an answer. Listings come in pages and manifests are small, so a longer one is unexpected."""
_PIECE_BYTES = 256 * 1024


@dataclass(frozen=True)
class HttpResponse:
    """A complete answer."""

    status: int
    headers: httpx2.Headers
    content: bytes
    url: str
    """The requested address."""

    @property
    def succeeded(self) -> bool:
        return httpx2.codes.is_success(self.status)

    @property
    def transient_failure(self) -> TransientError | None:
        """The failure if the request may succeed later; None if the answer is final."""
        if self.status not in RETRYABLE:
            return None
        return TransientError(f"HTTP status {self.status}", parse_retry_after(self.headers.get("Retry-After")))


class HttpClient:
    """Sends single requests, from several threads. Follows no redirect and sends only the given headers."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop, self._lock, self.bytes_sent = stop, threading.Lock(), 0
        self._client = httpx2.Client(
            timeout=httpx2.Timeout(SILENCE_SECONDS, read=ANSWER_SECONDS),
            headers={"User-Agent": "finetune-operator", "Accept-Encoding": "identity"},
            follow_redirects=False,
        )

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def send(self, method: str, url: str, headers: dict[str, str], body: bytes | None = None) -> HttpResponse:
        """Send a request and return its answer, whatever its status. Raises TransientError without an answer, and
        StoppedError.
        """
        if body is None:
            return self.stream(method, url, headers, None, 0)
        return self.stream(method, url, headers, (body,), len(body))

    def stream(self, method: str, url: str, headers: dict[str, str], body: Iterable[bytes] | None, length: int) -> HttpResponse:
        """Send a request with a body of several parts, together `length` bytes; see `send`."""
        if self._stop.is_set():
            raise StoppedError
        content = None if body is None else self._pieces(body)
        lengths = {} if body is None else {"Content-Length": str(length)}
        try:
            with self._client.stream(method, url, headers=headers | lengths, content=content) as response:
                return HttpResponse(response.status_code, response.headers, _bounded(response), url)
        except httpx2.ConnectError as error:
            # Names the wrong address, and nothing was sent before.
            raise untrusted_certificate(error) or TransientError(f"no connection ({error})") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
            raise TransientError(f"the connection failed ({type(error).__name__})") from None

    def _pieces(self, body: Iterable[bytes]) -> Iterator[bytes]:
        for part in body:
            for start in range(0, len(part), _PIECE_BYTES):
                if self._stop.is_set():
                    raise StoppedError
                piece = part[start : start + _PIECE_BYTES]
                yield piece
                with self._lock:
                    self.bytes_sent += len(piece)


def _bounded(response: httpx2.Response) -> bytes:
    """The body. Raises TransientError if it is longer than any expected answer."""
    content = bytearray()
    for piece in response.iter_bytes():
        content += piece
        if len(content) > MOST_ANSWER_BYTES:
            raise TransientError(f"the answer is longer than {MOST_ANSWER_BYTES >> 20} MiB")
    return bytes(content)

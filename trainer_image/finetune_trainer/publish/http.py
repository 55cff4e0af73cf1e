"""Sends requests to a destination. Bodies are sent in small pieces, so that a request can be stopped. Errors do not show what was
sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import httpx2

from finetune_trainer.network.certificates import untrusted_certificate
from finetune_trainer.network.http_status import RETRYABLE, parse_retry_after
from finetune_trainer.network.retry import StoppedError, TransientError

SILENCE_SECONDS = 60.0
"""Seconds that connecting, or sending a piece, may take before a request counts as failed."""
ANSWER_SECONDS = 300.0
"""Seconds to wait for an answer: a long time, since object stores and registries first assemble or hash gigabytes."""
MOST_ANSWER_BYTES = 64 << 20
"""Largest body of an answer. Listings come in pages and manifests are small, so a larger body is unexpected."""
_PIECE_BYTES = 256 * 1024
Body = tuple[Callable[[], Iterable[bytes]], int]
"""A function that is called each time the body is sent and yields the body's parts, and the body's length in bytes."""


@dataclass(frozen=True)
class HttpResponse:
    """A complete answer to a request."""

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
        """The error to raise if the request may succeed later; None if the answer is final."""
        if self.status not in RETRYABLE:
            return None
        return TransientError(f"HTTP status {self.status}", parse_retry_after(self.headers.get("Retry-After")))


class HttpClient:
    """Sends single requests; several threads may use it. It follows no redirects and adds no credentials."""

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

    def send(self, method: str, url: str, headers: dict[str, str], body: bytes | Body | None = None) -> HttpResponse:
        """Send a request and return its answer, whatever the status.

        Raises TransientError if there is no answer or it is longer than any expected answer, and StoppedError.
        """
        if self._stop.is_set():
            raise StoppedError
        content, pieces, lengths = bytearray(), None, {}
        if body is not None:
            parts, length = ((body,), len(body)) if isinstance(body, bytes) else (body[0](), body[1])
            pieces, lengths = self._pieces(parts), {"Content-Length": str(length)}
        try:
            with self._client.stream(method, url, headers=headers | lengths, content=pieces) as response:
                for piece in response.iter_bytes():
                    content += piece
                    if len(content) > MOST_ANSWER_BYTES:
                        raise TransientError(f"the answer is longer than {MOST_ANSWER_BYTES >> 20} MiB")
                return HttpResponse(response.status_code, response.headers, bytes(content), url)
        except httpx2.ConnectError as error:
            # This text is safe to show: nothing was sent yet, so it contains only the server's address and no secret.
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

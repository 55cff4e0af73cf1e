"""Decides who may read the metrics: clients whose token the API server accepts and who may `get` the path `/metrics`.

This is how Kubernetes' own components protect their metrics (TokenReview and SubjectAccessReview). Probes need no token, because
the kubelet has none.
"""

from __future__ import annotations

import hashlib
import ssl
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from finetune_job.http_server import Answer, error_answer
from finetune_operator.client.access import load_configuration
from finetune_operator.client.answers import ApiError, ApiUnreachableError
from finetune_operator.client.api import Api
from finetune_operator.client.raw_objects import Fields
from finetune_operator.logs import logger

_log = logger(__name__)
PATH = "/metrics"
TOKEN_REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"  # noqa: S105 - a path
ACCESS_REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
ALLOWED_SECONDS, REFUSED_SECONDS = 60.0, 10.0
"""How long the API server's permission or refusal is cached."""
MOST_VERDICTS = 256
REQUESTS_AT_A_TIME = 4
"""Maximum number of concurrent requests to the API server, because anybody who reaches the port can send invalid tokens."""
REVIEW_SECONDS = 3.0
CERTIFICATE_SECONDS = 10.0
"""Seconds between two checks of the certificate's files."""


class MetricsGate:
    """Asks the API server about tokens, and caches each verdict for a while."""

    def __init__(self, connect: Callable[[], Awaitable[Api]] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`connect`: called once, in the event loop of the metrics server."""
        self._connect = connect or _connect
        self._api: Api | None = None
        self._clock = clock
        self._verdicts: OrderedDict[bytes, tuple[HTTPStatus, float]] = OrderedDict()
        """Digest of a token -> verdict, and when the verdict expires."""

    async def refusal(self, path: str, authorization: str) -> Answer | None:
        """See `ReaderCheck`."""
        if path != PATH:
            return None
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            return error_answer(HTTPStatus.UNAUTHORIZED, "send the token of a ServiceAccount: Authorization: Bearer TOKEN")
        try:
            verdict = await self._verdict(token)
        except (ApiError, ApiUnreachableError) as error:
            _log.warning("token of a metrics reader not checked", error=str(error))
            return error_answer(HTTPStatus.SERVICE_UNAVAILABLE, "the API server cannot check the token; see the operator's log")
        if verdict is HTTPStatus.UNAUTHORIZED:
            return error_answer(verdict, "the API server does not know this token")
        if verdict is HTTPStatus.FORBIDDEN:
            return error_answer(verdict, f"no ClusterRole of yours has `get` on the nonResourceURL {PATH}")
        return None

    async def close(self) -> None:
        """See `ReaderCheck`."""
        if self._api is not None:
            await self._api.close()

    async def _verdict(self, token: str) -> HTTPStatus:
        digest, now = hashlib.sha256(token.encode()).digest(), self._clock()
        known = self._verdicts.get(digest)
        if known is not None and now < known[1]:
            return known[0]
        verdict = await self._review(token)
        self._verdicts[digest] = (verdict, now + (ALLOWED_SECONDS if verdict is HTTPStatus.OK else REFUSED_SECONDS))
        self._verdicts.move_to_end(digest)
        while len(self._verdicts) > MOST_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    async def _review(self, token: str) -> HTTPStatus:
        if self._api is None:
            self._api = await self._connect()
        reviewed = await self._api.request("POST", TOKEN_REVIEWS, body=_review("authentication", "TokenReview", {"token": token}))
        status = Fields(reviewed).at("status")
        user = reviewed["status"].get("user") if status.flag("authenticated") else None
        if not isinstance(user, dict):
            return HTTPStatus.UNAUTHORIZED
        spec = {
            "user": user.get("username", ""),
            **{name: user[name] for name in ("groups", "uid", "extra") if name in user},
            "nonResourceAttributes": {"path": PATH, "verb": "get"},
        }
        answer = await self._api.request("POST", ACCESS_REVIEWS, body=_review("authorization", "SubjectAccessReview", spec))
        return HTTPStatus.OK if Fields(answer).at("status").flag("allowed") else HTTPStatus.FORBIDDEN


class Certificate:
    """The server's certificate. It is reloaded when its files change, for example because cert-manager has renewed it."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """`directory` contains tls.crt and tls.key. Raises OSError or ssl.SSLError if they cannot be read."""
        self._files = directory / "tls.crt", directory / "tls.key"
        self._clock = clock
        self._looked = clock()
        self._stamps = self._now()
        self._context = self._read()

    def __call__(self) -> ssl.SSLContext:
        """Return the context with the newest certificate that could be read."""
        if self._clock() - self._looked >= CERTIFICATE_SECONDS:
            self._looked = self._clock()
            try:
                stamps = self._now()
                if stamps != self._stamps:
                    self._context, self._stamps = self._read(), stamps
            except OSError as error:  # includes ssl.SSLError
                _log.warning("the new certificate cannot be read, so the old one stays in use", error=str(error))
        return self._context

    def _now(self) -> tuple[int, ...]:
        return tuple(file.stat().st_mtime_ns for file in self._files)

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self._files)
        return context


async def _connect() -> Api:
    return Api(await load_configuration(), most_in_flight=REQUESTS_AT_A_TIME, request_timeout=REVIEW_SECONDS)


def _review(group: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": f"{group}.k8s.io/v1", "kind": kind, "spec": spec}

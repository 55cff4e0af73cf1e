"""Requests to a registry for one repository: logged in as it asks, sent on where it says, its refusals in words.

Source: https://github.com/opencontainers/distribution-spec/blob/v1.1.0/spec.md.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable
from urllib.parse import urljoin, urlsplit

from finetune_job.api.base import RegistryPath
from finetune_trainer.credentials import DOCKER_HUB, RegistryLogin
from finetune_trainer.errors import DestinationRefusedError
from finetune_trainer.network.statuses import DENIED, FULL, NOT_FOUND, UNAUTHORIZED
from finetune_trainer.publish.errors import DESTINATION_FIELD, denied, full, not_found
from finetune_trainer.publish.http import Answer, Wire
from finetune_trainer.publish.registry_login import basic_authorization, bearer_authorization, challenges_of

Body = tuple[Callable[[], Iterable[bytes]], int]
"""Makes the parts of a body, again for each time that it is sent, and their length in bytes."""
_DOCKER_HUB_ADDRESS = "registry-1.docker.io"
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MOST_REDIRECTS = 5
_CODE = re.compile(r"[A-Z_]{1,64}")


class Registry:
    """One repository. Methods raise TransientError where trying again may help, else DestinationRefusedError."""

    def __init__(self, wire: Wire, place: RegistryPath, login: RegistryLogin | None, *, plain_http: bool) -> None:
        """`plain_http`: whether the registry is spoken to without TLS."""
        self._wire, self._login, self._plain_http = wire, login, plain_http
        is_docker_hub = place.registry == DOCKER_HUB
        self._repository = f"library/{place.repository}" if is_docker_hub and "/" not in place.repository else place.repository
        self._origin = f"{'http' if plain_http else 'https'}://{_DOCKER_HUB_ADDRESS if is_docker_hub else place.registry}"
        self._authorization: str | None = None
        self._lock = threading.Lock()
        self.shown = f"{DESTINATION_FIELD}: oci://{place.registry}/{place.repository}"

    def url(self, path: str) -> str:
        """Of something in the repository."""
        return f"{self._origin}/v2/{self._repository}/{path}"

    def send(
        self, method: str, url: str, headers: dict[str, str] | None = None, body: bytes | Body | None = None, *, what: str
    ) -> Answer:
        """An answer that is no refusal to let us in and no passing failure; the caller judges its status."""
        used = self._authorization
        answer = self._follow(method, url, headers or {}, body, used)
        if answer.status == UNAUTHORIZED and self._log_in(answer.headers.get("WWW-Authenticate", ""), used):
            answer = self._follow(method, url, headers or {}, body, self._authorization)
        if answer.status in DENIED:
            holds = "a login for this registry, of type kubernetes.io/dockerconfigjson, on your own machine from `docker login`"
            raise denied(self.shown, _said(answer, what), signed=self._login is not None, secret_holds=holds)
        if answer.status in FULL:
            raise full(self.shown, _said(answer, what))
        if answer.passing_failure is not None:
            raise answer.passing_failure
        return answer

    def check(self, answer: Answer, what: str) -> Answer:
        """Raise where the request failed."""
        if answer.succeeded:
            return answer
        if answer.status == NOT_FOUND:
            raise not_found(self.shown, _said(answer, what), "repository")
        raise DestinationRefusedError(
            f"{self.shown}: the registry refuses the request{_said(answer, what)}",
            "see whether the registry takes OCI artifacts, and check the address in spec.output.destination",
        )

    def location(self, answer: Answer) -> str:
        """Where an upload goes on."""
        return self._secure(urljoin(answer.url, answer.headers.get("Location", "")))

    def _secure(self, url: str) -> str:
        if not self._plain_http and urlsplit(url).scheme != "https":
            raise DestinationRefusedError(
                f"{self.shown}: sends us on to an address without TLS", "have the registry's administrator mend it"
            )
        return url

    def _follow(
        self, method: str, url: str, headers: dict[str, str], body: bytes | Body | None, authorization: str | None
    ) -> Answer:
        for _ in range(_MOST_REDIRECTS):
            sent = dict(headers)
            # Storage to which a registry sends us on has its own signatures, and must not learn the registry's secrets.
            if authorization is not None and _origin(url) == _origin(self._origin):
                sent["Authorization"] = authorization
            if isinstance(body, tuple):
                parts, length = body
                answer = self._wire.stream(method, url, sent, parts(), length)
            else:
                answer = self._wire.send(method, url, sent, body)
            if answer.status not in _REDIRECTS:
                return answer
            url = self.location(answer)
        raise DestinationRefusedError(f"{self.shown}: sends us on in circles", "have the registry's administrator mend it")

    def _log_in(self, header: str, used: str | None) -> bool:
        """Whether it is worth asking again. `used`: what was refused."""
        with self._lock:
            if self._authorization != used:  # another thread has logged in meanwhile
                return True
            for challenge in challenges_of(header):
                if challenge.scheme == "bearer":
                    scope = f"repository:{self._repository}:pull,push"
                    self._authorization = bearer_authorization(
                        self._wire, challenge, self._login, scope, self.shown, plain_http=self._plain_http
                    )
                    return self._authorization is not None
                if self._login is not None and self._login.password:
                    self._authorization = basic_authorization(self._login)
                    return self._authorization != used
            return False


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _said(answer: Answer, what: str) -> str:
    """Status and the registry's error code; its message may hold anything."""
    try:
        code = str(json.loads(answer.content)["errors"][0]["code"])
    except (ValueError, KeyError, IndexError, TypeError):
        code = ""
    shown = f", {code}" if _CODE.fullmatch(code) else ""
    return f" (HTTP status {answer.status}{shown}, {what})"

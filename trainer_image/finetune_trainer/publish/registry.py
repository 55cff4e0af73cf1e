"""Sends requests to a registry for one repository: logs in, follows redirects, and explains refusals.

Sources: https://github.com/opencontainers/distribution-spec/blob/v1.1.0/spec.md; RFC 7617 (Basic), RFC 6750 (Bearer), and the
token protocol of https://distribution.github.io/distribution/spec/auth/token/ and .../oauth/, which registries and `docker login`
use.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from dataclasses import dataclass
from urllib.parse import urlencode, urljoin, urlsplit

from finetune_job.api.base import RegistryPath
from finetune_trainer.credentials import DOCKER_HUB, RegistryLogin
from finetune_trainer.errors import DestinationRefusedError
from finetune_trainer.network.http_status import DENIED, FULL, NOT_FOUND, UNAUTHORIZED
from finetune_trainer.publish.destination import DESTINATION_FIELD, access_denied, out_of_space, target_not_found
from finetune_trainer.publish.http import Body, HttpClient, HttpResponse

_DOCKER_HUB_ADDRESS = "registry-1.docker.io"
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MOST_REDIRECTS = 5
_CODE = re.compile(r"[A-Z_]{1,64}")
CLIENT = "finetune-operator"
_SCHEME = re.compile(r"(Basic|Bearer)\b", re.IGNORECASE)
_PARAMETER = re.compile(r'([a-zA-Z_]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))')


class Registry:
    """One repository. Methods raise TransientError if another attempt may help, otherwise DestinationRefusedError."""

    def __init__(self, wire: HttpClient, place: RegistryPath, login: RegistryLogin | None, *, plain_http: bool) -> None:
        """plain_http: whether to connect to the registry without TLS."""
        self._wire, self._login, self._plain_http = wire, login, plain_http
        is_docker_hub = place.registry == DOCKER_HUB
        self._repository = f"library/{place.repository}" if is_docker_hub and "/" not in place.repository else place.repository
        self._origin = f"{'http' if plain_http else 'https'}://{_DOCKER_HUB_ADDRESS if is_docker_hub else place.registry}"
        self._authorization: str | None = None
        self._lock = threading.Lock()
        self.shown = f"{DESTINATION_FIELD}: oci://{place.registry}/{place.repository}"

    def url(self, path: str) -> str:
        """Return the URL of this path in the repository."""
        return f"{self._origin}/v2/{self._repository}/{path}"

    def is_own(self, url: str) -> bool:
        """Whether the address belongs to the registry itself."""
        return _origin(url) == _origin(self._origin)

    def send(
        self, method: str, url: str, headers: dict[str, str] | None = None, body: bytes | Body | None = None, *, what: str
    ) -> HttpResponse:
        """Send a request and return its answer, whose status the caller checks.

        Raises errors for refused access, full storage and transient failures.
        """
        used = self._authorization
        answer = self._follow(method, url, headers or {}, body, used)
        if answer.status == UNAUTHORIZED and self._log_in(answer.headers.get("WWW-Authenticate", ""), used):
            answer = self._follow(method, url, headers or {}, body, self._authorization)
        if answer.status in DENIED:
            holds = "a login for this registry, of type kubernetes.io/dockerconfigjson, on your own machine from `docker login`"
            raise access_denied(self.shown, _status_text(answer, what), signed=self._login is not None, secret_holds=holds)
        if answer.status in FULL:
            raise out_of_space(self.shown, _status_text(answer, what))
        if answer.transient_failure is not None:
            raise answer.transient_failure
        return answer

    def request(
        self, method: str, url: str, headers: dict[str, str] | None = None, body: bytes | Body | None = None, *, what: str
    ) -> HttpResponse:
        """Send a request and return the answer. Raises an error if the request failed."""
        return self.check(self.send(method, url, headers, body, what=what), what)

    def check(self, answer: HttpResponse, what: str) -> HttpResponse:
        """Return the answer. Raises an error if the request failed."""
        if answer.succeeded:
            return answer
        if answer.status == NOT_FOUND:
            raise target_not_found(self.shown, _status_text(answer, what), "repository")
        raise DestinationRefusedError(
            f"{self.shown}: the registry refuses the request{_status_text(answer, what)}",
            "check that the registry accepts OCI artifacts, and the address in spec.output.destination",
        )

    def location(self, answer: HttpResponse) -> str:
        """Return the address at which an upload continues."""
        url = urljoin(answer.url, answer.headers.get("Location", ""))
        if not self._plain_http and urlsplit(url).scheme != "https":
            raise DestinationRefusedError(
                f"{self.shown}: redirects to an address without TLS", "have the registry's administrator fix it"
            )
        return url

    def _follow(
        self, method: str, url: str, headers: dict[str, str], body: bytes | Body | None, authorization: str | None
    ) -> HttpResponse:
        for _ in range(_MOST_REDIRECTS):
            sent = dict(headers)
            # A registry may redirect to a storage service with signed addresses, which must not get the registry's credentials.
            if authorization is not None and self.is_own(url):
                sent["Authorization"] = authorization
            answer = self._wire.send(method, url, sent, body)
            if answer.status not in _REDIRECTS:
                return answer
            url = self.location(answer)
        raise DestinationRefusedError(f"{self.shown}: redirects in a loop", "have the registry's administrator fix it")

    def _log_in(self, header: str, used: str | None) -> bool:
        """Log in and return whether the request should be repeated. used: the authorization that was refused."""
        with self._lock:
            if self._authorization != used:  # another thread has logged in meanwhile
                return True
            for challenge in parse_challenges(header):
                if challenge.scheme == "bearer":
                    self._authorization = self._bearer_authorization(challenge)
                    return self._authorization is not None
                if self._login is not None and self._login.password:
                    self._authorization = _basic_authorization(self._login)
                    return self._authorization != used
            return False

    def _bearer_authorization(self, challenge: Challenge) -> str | None:
        """Return an Authorization header with a token for this repository; None if the token service refuses.

        The registry itself names the token service, so this service may see the same login as the registry. Only a
        `plain_http` registry may name a service without TLS. Raises TransientError, DestinationRefusedError.
        """
        realm = challenge.parameters.get("realm", "")
        scheme = urlsplit(realm).scheme
        if scheme != "https" and not (self._plain_http and scheme == "http"):
            raise DestinationRefusedError(
                f"{self.shown} names a token service without TLS, which gets no credentials",
                "have the registry's administrator fix it",
            )
        query = {"service": challenge.parameters["service"]} if "service" in challenge.parameters else {}
        query["scope"] = f"repository:{self._repository}:pull,push"
        if self._login is not None and self._login.identity_token is not None:
            form = {"grant_type": "refresh_token", "refresh_token": self._login.identity_token, "client_id": CLIENT}
            headers = {"Content-Type": "application/x-www-form-urlencoded"}
            answer = self._wire.send("POST", realm, headers, urlencode(query | form).encode())
        else:
            headers = {} if self._login is None else {"Authorization": _basic_authorization(self._login)}
            separator = "&" if "?" in realm else "?"
            answer = self._wire.send("GET", f"{realm}{separator}{urlencode(query)}", headers)
        if answer.transient_failure is not None:
            raise answer.transient_failure
        if not answer.succeeded:
            return None
        try:
            document = json.loads(answer.content)
            token = document.get("token") or document.get("access_token")
        except (ValueError, AttributeError):
            token = None
        return f"Bearer {token}" if isinstance(token, str) and token else None


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _status_text(answer: HttpResponse, what: str) -> str:
    """Return the status and the registry's error code as text. The registry's message may contain anything, so it is left out."""
    try:
        code = str(json.loads(answer.content)["errors"][0]["code"])
    except (ValueError, KeyError, IndexError, TypeError):
        code = ""
    shown = f", {code}" if _CODE.fullmatch(code) else ""
    return f" (HTTP status {answer.status}{shown}, {what})"


@dataclass(frozen=True)
class Challenge:
    """One authentication scheme that a registry offers."""

    scheme: str
    """Name in lower case."""
    parameters: dict[str, str]


def parse_challenges(header: str) -> list[Challenge]:
    """Return the known schemes of a WWW-Authenticate header, in the header's order."""
    challenges = []
    starts = [match for match in _SCHEME.finditer(header) if header[: match.start()].count('"') % 2 == 0]
    for number, match in enumerate(starts):
        end = starts[number + 1].start() if number + 1 < len(starts) else len(header)
        # A parameter may have the same name as a scheme. It is then followed by =, and does not begin a challenge.
        if header[match.end() : end].lstrip().startswith("="):
            continue
        parameters = {name.lower(): quoted or plain for name, quoted, plain in _PARAMETER.findall(header[match.end() : end])}
        challenges.append(Challenge(match[1].lower(), parameters))
    return challenges


def _basic_authorization(login: RegistryLogin) -> str:
    return "Basic " + base64.b64encode(f"{login.username}:{login.password}".encode()).decode()

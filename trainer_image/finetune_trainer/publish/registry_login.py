"""How a registry is opened: what its challenge asks for, answered with the user's login or with none.

Source: RFC 7617 (Basic), RFC 6750 (Bearer), and the token protocol of https://distribution.github.io/distribution/spec/auth/token/
and https://distribution.github.io/distribution/spec/auth/oauth/, which is what registries and `docker login` speak.
"""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass
from urllib.parse import urlencode, urlsplit

from finetune_trainer.credentials import RegistryLogin
from finetune_trainer.errors import DestinationRefusedError
from finetune_trainer.publish.http import Wire

CLIENT = "finetune-operator"
_SCHEME = re.compile(r"(Basic|Bearer)\b", re.IGNORECASE)
_PARAMETER = re.compile(r'([a-zA-Z_]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))')


@dataclass(frozen=True)
class Challenge:
    """One way in, as a registry offers it."""

    scheme: str
    """Lower case."""
    parameters: dict[str, str]


def challenges_of(header: str) -> list[Challenge]:
    """The ways in of a WWW-Authenticate header that are known here, in its order."""
    found = []
    starts = [match for match in _SCHEME.finditer(header) if header[: match.start()].count('"') % 2 == 0]
    for number, match in enumerate(starts):
        end = starts[number + 1].start() if number + 1 < len(starts) else len(header)
        # A parameter's name is no scheme.
        if header[match.end() : end].lstrip().startswith("="):
            continue
        parameters = {name.lower(): quoted or plain for name, quoted, plain in _PARAMETER.findall(header[match.end() : end])}
        found.append(Challenge(match[1].lower(), parameters))
    return found


def basic_authorization(login: RegistryLogin) -> str:
    """Value of the header."""
    return "Basic " + base64.b64encode(f"{login.username}:{login.password}".encode()).decode()


def bearer_authorization(
    wire: Wire, challenge: Challenge, login: RegistryLogin | None, scope: str, shown: str, *, plain_http: bool
) -> str | None:
    """Value of the header, with a token for this scope; None where the token service refuses.

    The registry itself names the token service, so whoever trusts the one with a login trusts the other; only `plain_http`
    registries may name one without TLS. Raises TransientError, DestinationRefusedError.
    """
    realm = challenge.parameters.get("realm", "")
    scheme = urlsplit(realm).scheme
    if scheme != "https" and not (plain_http and scheme == "http"):
        raise DestinationRefusedError(
            f"{shown}: names a token service without TLS, which gets no credentials", "have the registry's administrator mend it"
        )
    query = {"service": challenge.parameters["service"]} if "service" in challenge.parameters else {}
    query["scope"] = scope
    if login is not None and login.identity_token is not None:
        form = query | {"grant_type": "refresh_token", "refresh_token": login.identity_token, "client_id": CLIENT}
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        answer = wire.send("POST", realm, headers, urlencode(form).encode())
    else:
        headers = {} if login is None else {"Authorization": basic_authorization(login)}
        separator = "&" if "?" in realm else "?"
        answer = wire.send("GET", f"{realm}{separator}{urlencode(query)}", headers)
    if answer.passing_failure is not None:
        raise answer.passing_failure
    if not answer.succeeded:
        return None
    try:
        document = json.loads(answer.content)
        token = document.get("token") or document.get("access_token")
    except (ValueError, AttributeError):
        token = None
    return f"Bearer {token}" if isinstance(token, str) and token else None

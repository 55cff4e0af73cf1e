"""Reads credentials, in a pod only from the files that the kubelet mounts.

On a user's own machine, which has no such mount, credentials come from wherever each service's own tools keep them. A value is
read when it is needed, lives no longer than the client that uses it, and never appears in a repr.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_job.names import HUB_TOKEN, REGISTRY_LOGINS, S3_KEYS, SIGNING_KEY, CredentialFile
from finetune_trainer.errors import ConfigError, DestinationRefusedError

if TYPE_CHECKING:
    from boto3.session import Session

DOCKER_HUB = "docker.io"
_DOCKER_HUB_HOSTS = frozenset({DOCKER_HUB, "index.docker.io", "registry-1.docker.io"})
_DOCKER_HUB_KEY = "https://index.docker.io/v1/"
"""Key under which Docker stores the login of Docker Hub."""
_TOKEN_USER = "<token>"  # noqa: S105 - with this user name, the password is an identity token
_HELPER_SECONDS = 60.0
"""Timeout of a credential helper, in seconds. It leaves time for a helper that prompts the user."""
_LOGINS_HINT = (
    "spec.output.secretRef must name a Secret of type kubernetes.io/dockerconfigjson, as `kubectl create secret docker-registry` "
    "makes it (on your own machine: `docker login`)"
)


@dataclass(frozen=True)
class RegistryLogin:
    """A login to a registry: user name and password, or an identity token for a token service."""

    username: str = field(repr=False)
    password: str = field(repr=False)
    identity_token: str | None = field(repr=False, default=None)


class Credentials:
    """Looks up the credentials that a role needs."""

    def __init__(self, directory: Path) -> None:
        """directory: where credentials are mounted. If it does not exist, this process runs on a user's own machine."""
        self._directory = directory

    @property
    def _is_local(self) -> bool:
        return not self._directory.is_dir()

    def _value(self, file: CredentialFile) -> str | None:
        """Return the value in a file, without the newline that editors add; None if the file is missing or empty."""
        try:
            return (self._directory / file.path).read_text().strip() or None
        except FileNotFoundError:
            return None

    def hub_token(self) -> str | None:
        """Return the token for the Hub. On a user's machine, it is HF_TOKEN or the token that `hf auth login` stored."""
        if not self._is_local:
            return self._value(HUB_TOKEN)
        from huggingface_hub import get_token

        return get_token()

    def s3_session(self) -> Session | None:
        """Return boto3's session, or None if requests are not to be signed.

        On a user's machine, it has the credentials that AWS tools would use: variables, profiles, single sign-on, machine role.
        In a pod, it uses only the Secret, because a node's role is not the user's. Raises ConfigError for wrong settings.
        """
        from boto3.session import Session
        from botocore.exceptions import BotoCoreError

        if self._is_local:
            try:
                session = Session()
                return session if session.get_credentials() is not None else None
            except BotoCoreError as error:
                raise ConfigError(f"AWS credentials: {error}", "correct AWS_PROFILE, or the files in ~/.aws") from None
        key_id, secret, token = (self._value(file) for file in S3_KEYS)
        if not (key_id and secret):
            return None
        return Session(aws_access_key_id=key_id, aws_secret_access_key=secret, aws_session_token=token)

    def signing_key(self) -> str | None:
        """Return the signing key as PEM; None if nothing is to be signed, as is always the case on a user's machine."""
        return None if self._is_local else self._value(SIGNING_KEY)

    def registry_login(self, registry: str) -> RegistryLogin | None:
        """Return the login for a registry; None if there is none. On a user's machine, it comes from Docker's configuration.

        Raises DestinationRefusedError if the file of logins is malformed or unreadable, or a credential helper cannot be run.
        """
        if self._is_local:
            path = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
        else:
            path = self._directory / REGISTRY_LOGINS.path
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            logins = json.loads(content)
            return (_login_of_helper(registry, logins) if self._is_local else None) or login_for(registry, logins)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            # The exception is not shown, because its text may quote the file.
            raise DestinationRefusedError(f"{path} holds no logins for registries", _LOGINS_HINT) from None
        except (OSError, subprocess.TimeoutExpired) as error:
            message = f"{path}: a credential helper failed ({type(error).__name__})"
            raise DestinationRefusedError(message, "check that the helper named there works, or log in without it") from None


def _login_of_helper(registry: str, logins: Mapping[str, Any]) -> RegistryLogin | None:
    """Ask the registry's credential helper, or else the default helper, as Docker does. Returns None if there is no login.

    Raises ValueError, TypeError, AttributeError, KeyError for malformed documents; OSError, TimeoutExpired if the helper fails.
    """
    name = (logins.get("credHelpers") or {}).get(registry) or logins.get("credsStore")
    if not name:
        return None
    server = _DOCKER_HUB_KEY if _host(registry) == _DOCKER_HUB_KEY else registry
    done = subprocess.run(
        [f"docker-credential-{name}", "get"], input=server, capture_output=True, text=True, timeout=_HELPER_SECONDS, check=False
    )
    if done.returncode != 0:
        return None
    answer = json.loads(done.stdout)
    username, secret = answer["Username"], answer["Secret"]
    return RegistryLogin(username, secret, secret if username == _TOKEN_USER else None)


def login_for(registry: str, logins: Mapping[str, Any]) -> RegistryLogin | None:
    """Find the login of a registry in a dockerconfigjson; None if there is none.

    Docker uses host and port as keys. Older keys are URLs with scheme and path, of which only the host matters. Raises
    ValueError, TypeError, AttributeError if the document is malformed.
    """
    entries = logins.get("auths") or {}
    wanted = _host(registry)
    entry = next((entry for key, entry in entries.items() if key == registry), None)
    if entry is None:
        entry = next((entry for key, entry in entries.items() if _host(key) == wanted), None)
    if entry is None:
        return None
    username, password = entry.get("username") or "", entry.get("password") or ""
    if entry.get("auth"):
        try:
            decoded = base64.b64decode(entry["auth"], validate=True).decode()
        except binascii.Error as error:
            raise ValueError("auth is not base64") from error
        username, _, password = decoded.rstrip("\0").partition(":")
    token = entry.get("identitytoken") or (password if username == _TOKEN_USER else None)
    if not token and not (username and password):
        return None
    return RegistryLogin(username, password, token or None)


def _host(key: str) -> str:
    host = key.removeprefix("https://").removeprefix("http://").partition("/")[0].lower()
    return _DOCKER_HUB_KEY if host in _DOCKER_HUB_HOSTS else host

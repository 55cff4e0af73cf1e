"""A real OCI registry on an address of this machine, Debian's docker-registry, and a client of its own to pull with.

The client is plain urllib: nothing of what pushed has a part in it.
"""

import base64
import hashlib
import json
import shutil
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.cluster.certificates import CertificateAuthority
from tools.cluster.errors import wait_until
from tools.cluster.processes import Component, start_component
from tools.cluster.requirements import install_packages

USER, PASSWORD = "publisher", "password-of-the-registry"
_HTPASSWD = "publisher:$2b$04$TvqnjNjG45g7IN8maJHIP.dWmDI5.8FCtHL.hK8IP2o3Y1lBce/oi\n"
"""The password in the form of bcrypt, the only one that the registry accepts."""
_PROGRAM = "docker-registry"
_START_SECONDS = 60.0
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


class NotThereError(Exception):
    """The registry has no such thing."""


@dataclass(frozen=True)
class Registry:
    """A running registry."""

    host: str
    """Host and port."""
    storage: Path
    server: Component
    login: tuple[str, str] | None = None
    """User name and password; None: the registry asks for none."""
    authority: CertificateAuthority | None = None
    """Authority of its certificate; None: the registry does not use TLS."""

    def docker_config(self, host: str | None = None) -> str:
        """config.json as `docker login` writes it."""
        if self.login is None:
            return json.dumps({"auths": {}})
        return json.dumps({"auths": {host or self.host: {"auth": base64.b64encode(":".join(self.login).encode()).decode()}}})

    def digest(self, repository: str, reference: str) -> str:
        """Return the digest of the manifest that a tag names. Raises NotThereError."""
        return f"sha256:{hashlib.sha256(self._get(repository, f'manifests/{reference}')).hexdigest()}"

    def manifest(self, repository: str, reference: str) -> dict[str, Any]:
        """Raises NotThereError."""
        found: dict[str, Any] = json.loads(self._get(repository, f"manifests/{reference}"))
        return found

    def pull(self, repository: str, reference: str) -> dict[str, bytes]:
        """Content by file name. Raises NotThereError where a layer is missing, ValueError where one is not what its digest
        says."""
        manifest = self.manifest(repository, reference)
        files = {}
        for layer in [manifest["config"], *manifest["layers"]]:
            content = self._get(repository, f"blobs/{layer['digest']}")
            if (len(content), f"sha256:{hashlib.sha256(content).hexdigest()}") != (layer["size"], layer["digest"]):
                raise ValueError(f"{layer['digest']} holds something else")
            if "annotations" in layer:
                files[layer["annotations"]["org.cncf.model.filepath"]] = content
        return files

    def _get(self, repository: str, path: str) -> bytes:
        scheme, tls = ("http", None) if self.authority is None else ("https", self.authority.client_context())
        request = urllib.request.Request(f"{scheme}://{self.host}/v2/{repository}/{path}", headers={"Accept": _MANIFEST})
        if self.login is not None:
            request.add_header("Authorization", "Basic " + base64.b64encode(":".join(self.login).encode()).decode())
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls))
        try:
            with opener.open(request, timeout=60) as answer:
                content: bytes = answer.read()
                return content
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                raise NotThereError(path) from None
            raise


@contextmanager
def running_registry(
    directory: Path, address: str = "127.0.0.1", *, needs_login: bool = False, authority: CertificateAuthority | None = None
) -> Iterator[Registry]:
    """Start one with its files below `directory`, on a free port of `address`; with TLS if `authority` is to sign for it."""
    if shutil.which(_PROGRAM) is None:
        install_packages([_PROGRAM])
    storage = directory / "storage"
    storage.mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind((address, 0))
        host = f"{address}:{probe.getsockname()[1]}"
    config: dict[str, Any] = {
        "version": "0.1",
        "log": {"level": "info"},
        "storage": {"filesystem": {"rootdirectory": str(storage)}, "delete": {"enabled": True}},
        # Of all replicas of a registry the same, so that an upload continues at another one.
        "http": {"addr": host, "secret": "shared-by-all-replicas"},
    }
    if authority is not None:
        pair = authority.sign("registry", "/CN=registry", "serverAuth", [f"IP:{address}"])
        config["http"]["tls"] = {"certificate": str(pair.certificate), "key": str(pair.key)}
    if needs_login:
        (directory / "htpasswd").write_text(_HTPASSWD)
        config["auth"] = {"htpasswd": {"realm": "test", "path": str(directory / "htpasswd")}}
    # JSON is YAML.
    (directory / "config.yml").write_text(json.dumps(config))
    server = start_component(_PROGRAM, [_PROGRAM, "serve", directory / "config.yml"], directory / "registry.log")
    try:
        wait_until(lambda: _answers(server, host), f"the registry, see {server.log}", _START_SECONDS)
        yield Registry(host, storage, server, (USER, PASSWORD) if needs_login else None, authority)
    finally:
        server.kill()


def _answers(server: Component, host: str) -> bool:
    server.check_running()
    name, _, port = host.partition(":")
    try:
        socket.create_connection((name, int(port)), timeout=1).close()
    except OSError:
        return False
    return True

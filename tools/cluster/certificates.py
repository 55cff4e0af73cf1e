"""Certificates, keys and kubeconfigs of one cluster run, made with the openssl program."""

import base64
import json
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tools.cluster.processes import run_command

_VALID_DAYS = "30"
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass(frozen=True)
class KeyPair:
    """Paths of a PEM certificate and of its private key."""

    certificate: Path
    key: Path


class CertificateAuthority:
    """Signs a run's certificates. All files are in one directory that only its owner can read."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700)
        self._directory = directory
        self.certificate = directory / "ca.crt"
        self._key = directory / "ca.key"
        run_command(
            *("openssl", "req", "-x509", *_NEW_KEY, "-days", _VALID_DAYS, "-subj", "/CN=test-cluster-ca"),
            *("-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign,cRLSign"),
            *("-keyout", self._key, "-out", self.certificate),
        )

    def sign(self, name: str, subject: str, usage: Literal["clientAuth", "serverAuth"], hosts: Sequence[str] = ()) -> KeyPair:
        """Make a key and a certificate for it.

        Args:
            name: file name without its ending.
            subject: distinguished name in openssl's form, `/O=group/CN=user`.
            usage: what the certificate may be used for.
            hosts: subject alternative names in openssl's form, `DNS:name` or `IP:address`.
        """
        pair = KeyPair(self._directory / f"{name}.crt", self._directory / f"{name}.key")
        request = self._directory / f"{name}.csr"
        extensions = self._directory / f"{name}.ext"
        lines = ["keyUsage=critical,digitalSignature", f"extendedKeyUsage={usage}"]
        if hosts:
            lines.append(f"subjectAltName={','.join(hosts)}")
        extensions.write_text("\n".join(lines) + "\n")
        run_command("openssl", "req", *_NEW_KEY, "-subj", subject, "-keyout", pair.key, "-out", request)
        run_command(
            *("openssl", "x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._key),
            *("-CAcreateserial", "-days", _VALID_DAYS, "-extfile", extensions, "-out", pair.certificate),
        )
        return pair

    def server_context(self, address: str) -> ssl.SSLContext:
        """Return the TLS context of a server at an IP address."""
        pair = self.sign("server", "/CN=server", "serverAuth", [f"IP:{address}"])
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(pair.certificate, pair.key)
        return context

    def client_context(self) -> ssl.SSLContext:
        """Return the TLS context of a client that trusts only this authority."""
        return ssl.create_default_context(cafile=self.certificate)

    def service_account_key(self) -> tuple[Path, Path]:
        """Make the key that signs service account tokens; return the paths of the private and the public key."""
        private, public = self._directory / "service-accounts.key", self._directory / "service-accounts.pub"
        run_command("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", private)
        run_command("openssl", "ec", "-in", private, "-pubout", "-out", public)
        return private, public

    def kubeconfig(self, name: str, server: str, pair: KeyPair) -> Path:
        """Write a self-contained kubeconfig for the holder of `pair` and return its path."""

        def encoded(path: Path) -> str:
            return base64.b64encode(path.read_bytes()).decode()

        user = {"client-certificate-data": encoded(pair.certificate), "client-key-data": encoded(pair.key)}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "test", "cluster": {"server": server, "certificate-authority-data": encoded(self.certificate)}}
            ],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
            "current-context": "test",
        }
        path = self._directory / f"{name}.kubeconfig"
        path.write_text(json.dumps(document, indent=2))
        path.chmod(0o600)
        return path

"""Signatures with a key pair, by openssl, over the documents that cosign knows.

Sources: cosign's SIGNATURE_SPEC.md and ATTESTATION_SPEC.md; the DSSE protocol, https://github.com/secure-systems-lab/dsse.
"""

import base64
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.images.programs import ImageError, run

PASSWORD_VARIABLE = "KEY_PASSWORD"  # noqa: S105
"""Environment variable: what an encrypted key is opened with."""
_P256_PUBLIC_KEY = "MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE"
"""How every public key of the curve P-256 begins, in PEM."""
_STATEMENT_TYPE = "application/vnd.in-toto+json"


@dataclass(frozen=True)
class SigningKey:
    """A private key of the curve P-256 in a PEM file."""

    path: Path
    public_key: str
    """PEM."""

    def sign(self, data: bytes) -> str:
        """ECDSA over the SHA-256 of the data, base64. Raises ImageError."""
        with tempfile.TemporaryDirectory(prefix="signing-") as directory:
            message, signature = Path(directory) / "message", Path(directory) / "signature"
            message.write_bytes(data)
            run("openssl", "dgst", "-sha256", "-sign", self.path, *_password(), "-out", signature, message)
            return base64.b64encode(signature.read_bytes()).decode()


def read_key(path: Path) -> SigningKey:
    """Read a private key. Raises ImageError if it is of another kind, or KEY_PASSWORD does not open it."""
    public_key = run("openssl", "pkey", "-in", path.absolute(), *_password(), "-pubout")
    if _P256_PUBLIC_KEY not in public_key:
        raise ImageError(
            f"{path} is no key of the curve P-256, which cosign verifies: make one with "
            "`openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out finetune.key`"
        )
    return SigningKey(path.absolute(), public_key)


def _password() -> tuple[str, str]:
    # Without one openssl must not ask the terminal.
    return ("-passin", f"env:{PASSWORD_VARIABLE}" if PASSWORD_VARIABLE in os.environ else "pass:")


def signature_payload(reference: str, digest: str) -> bytes:
    """What a signature of an image says.

    Args:
        reference: Registry and repository.
        digest: Of the manifest, with `sha256:`.
    """
    critical = {
        "identity": {"docker-reference": reference},
        "image": {"docker-manifest-digest": digest},
        "type": "cosign container image signature",
    }
    return json.dumps({"critical": critical, "optional": None}, separators=(",", ":")).encode()


def envelope(statement: dict[str, Any], key: SigningKey) -> bytes:
    """A statement with its signature, as DSSE. Raises ImageError."""
    payload = json.dumps(statement, separators=(",", ":")).encode()
    signature = key.sign(b"DSSEv1 %d %s %d %s" % (len(_STATEMENT_TYPE), _STATEMENT_TYPE.encode(), len(payload), payload))
    document = {
        "payloadType": _STATEMENT_TYPE,
        "payload": base64.b64encode(payload).decode(),
        "signatures": [{"keyid": "", "sig": signature}],
    }
    return json.dumps(document, separators=(",", ":")).encode()

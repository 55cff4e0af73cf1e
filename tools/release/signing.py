"""Signs documents in cosign's formats with a key pair, by openssl.

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
"""Environment variable with the password of an encrypted key."""
_P256_PUBLIC_KEY = "MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE"
"""Text with which every public key on the curve P-256 begins, in PEM."""
_STATEMENT_TYPE = "application/vnd.in-toto+json"


@dataclass(frozen=True)
class SigningKey:
    """A private key on the curve P-256 in a PEM file."""

    path: Path
    public_key: str
    """The public key in PEM."""

    def sign(self, data: bytes) -> str:
        """Return the ECDSA signature of the data's SHA-256 in base64. Raises ImageError."""
        with tempfile.TemporaryDirectory(prefix="signing-") as directory:
            message, signature = Path(directory) / "message", Path(directory) / "signature"
            message.write_bytes(data)
            run("openssl", "dgst", "-sha256", "-sign", self.path, *_password(), "-out", signature, message)
            return base64.b64encode(signature.read_bytes()).decode()


def read_key(path: Path) -> SigningKey:
    """Read a private key. Raises ImageError if it is not on the curve P-256, or if KEY_PASSWORD is wrong."""
    public_key = run("openssl", "pkey", "-in", path.absolute(), *_password(), "-pubout")
    if _P256_PUBLIC_KEY not in public_key:
        raise ImageError(
            f"{path} is not a key on the curve P-256, which cosign verifies: make one with "
            "`openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out finetune.key`"
        )
    return SigningKey(path.absolute(), public_key)


def _password() -> tuple[str, str]:
    # If there is no password, openssl must not ask for one on the terminal.
    return ("-passin", f"env:{PASSWORD_VARIABLE}" if PASSWORD_VARIABLE in os.environ else "pass:")


def signature_payload(reference: str, digest: str) -> bytes:
    """Return the signed payload of an image's signature.

    Args:
        reference: Registry and repository.
        digest: Digest of the manifest, with `sha256:`.
    """
    critical = {
        "identity": {"docker-reference": reference},
        "image": {"docker-manifest-digest": digest},
        "type": "cosign container image signature",
    }
    return json.dumps({"critical": critical, "optional": None}, separators=(",", ":")).encode()


def envelope(statement: dict[str, Any], key: SigningKey) -> bytes:
    """Return a DSSE envelope with a statement and its signature. Raises ImageError."""
    payload = json.dumps(statement, separators=(",", ":")).encode()
    signature = key.sign(b"DSSEv1 %d %s %d %s" % (len(_STATEMENT_TYPE), _STATEMENT_TYPE.encode(), len(payload), payload))
    document = {
        "payloadType": _STATEMENT_TYPE,
        "payload": base64.b64encode(payload).decode(),
        "signatures": [{"keyid": "", "sig": signature}],
    }
    return json.dumps(document, separators=(",", ":")).encode()

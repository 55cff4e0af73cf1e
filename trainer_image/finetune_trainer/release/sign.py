"""Signs a release. The signature is over SHA256SUMS, which lists every other file with its digest.

Signatures are ECDSA over SHA-256 in base64, as `cosign verify-blob` and `openssl dgst -verify` expect. Equal releases get
equal signatures (RFC 6979), so a repeated publication sends the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import replace
from pathlib import Path

from finetune_trainer.errors import CheckpointError, DestinationRefusedError
from finetune_trainer.files import MOST_OWN_BYTES
from finetune_trainer.release.files import SIGNATURE, Release, ReleaseFile

_FIELD = "publish.signingKeySecret of the profile"
_MAKE_ONE = (
    "make a key with `openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out signing.key`, and the Secret with "
    "`kubectl create secret generic NAME --from-file signing.key`"
)


def signed(release: Release, key: str, directory: Path) -> Release:
    """Return the release with its signature as an additional file, which is written to `directory`.

    Args:
    release: The files to publish.
    key: Unencrypted private key of the curve P-256, as PEM.
    directory: A directory to which only this pod can write.

    Raises DestinationRefusedError for a key of another kind, CheckpointError if SHA256SUMS changed after it was read, OSError.
    """
    with release.manifest.open() as file:
        content = file.read(MOST_OWN_BYTES)
    if hashlib.sha256(content).hexdigest() != release.manifest.sha256:
        raise CheckpointError(f"{release.manifest.local}: changed while it was published", "find out who writes to the claim")
    signature = base64.b64encode(_sign(content, key)) + b"\n"
    (directory / SIGNATURE).write_bytes(signature)
    added = ReleaseFile(directory, SIGNATURE, SIGNATURE, len(signature), hashlib.sha256(signature).hexdigest())
    return replace(release, files=(*release.files, added))


def _sign(content: bytes, key: str) -> bytes:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        private = serialization.load_pem_private_key(key.encode(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        # The exception's text may contain a part of the key.
        raise DestinationRefusedError(
            f"{_FIELD}: signing.key is not a PEM file with an unencrypted private key", _MAKE_ONE
        ) from None
    if not isinstance(private, ec.EllipticCurvePrivateKey) or not isinstance(private.curve, ec.SECP256R1):
        raise DestinationRefusedError(f"{_FIELD}: signing.key is not a P-256 key", _MAKE_ONE)
    return private.sign(content, ec.ECDSA(hashes.SHA256(), deterministic_signing=True))

"""Errors of servers whose certificate is not trusted: retrying is useless, and the profile names the trusted authorities."""

from __future__ import annotations

import math
import ssl

from finetune_trainer.network.retry import TransientError

_FIX = (
    "if an authority of your own signed it, name its certificates in spec.caBundle of the FineTuneProfile "
    "(on your own machine: set SSL_CERT_FILE)"
)


def untrusted_certificate(error: BaseException) -> TransientError | None:
    """The error to raise if a certificate was refused, or None if something else is wrong. A role does not wait for it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _failure(cause.verify_message)
        cause = cause.__cause__ or cause.__context__
    return None


def _failure(reason: str) -> TransientError:
    return TransientError(f"the certificate of the server is not trusted ({reason}): {_FIX}", retry_after_seconds=math.inf)

"""Recognises errors about untrusted certificates. Retrying does not help; the profile names the trusted authorities."""

from __future__ import annotations

import math
import ssl

from finetune_trainer.network.retry import TransientError

_FIX = (
    "if an authority of your own signed it, name its certificates in spec.caBundle of the FineTuneProfile "
    "(on your own machine: set SSL_CERT_FILE)"
)


def untrusted_certificate(error: BaseException) -> TransientError | None:
    """Return the error to raise if a certificate was refused, which is never retried; None if something else is wrong."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            message = f"the certificate of the server is not trusted ({cause.verify_message}): {_FIX}"
            return TransientError(message, retry_after_seconds=math.inf)
        cause = cause.__cause__ or cause.__context__
    return None

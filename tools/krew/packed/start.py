"""Starts the command line of the bundle that contains this file."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
OF_DEBIAN = Path("/usr/lib/ssl/cert.pem")
AUTHORITIES = (
    Path("/etc/ssl/certs/ca-certificates.crt"),
    Path("/etc/pki/tls/certs/ca-bundle.crt"),
    Path("/etc/ssl/ca-bundle.pem"),
    Path("/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem"),
    Path("/etc/ssl/cert.pem"),
)
"""Files in which distributions store the authorities that they trust."""


def trust_authorities_of_the_machine() -> None:
    """Let OpenSSL find the machine's authorities: the bundle's OpenSSL is from Debian, which looks for them in one place only."""
    named = "SSL_CERT_FILE" in os.environ or "SSL_CERT_DIR" in os.environ
    if named or OF_DEBIAN.exists() or not (HERE / "python").exists():
        return
    authorities = next((path for path in AUTHORITIES if path.exists()), None)
    if authorities is not None:
        os.environ["SSL_CERT_FILE"] = str(authorities)


if __name__ == "__main__":
    trust_authorities_of_the_machine()
    sys.path.insert(0, str(HERE / "lib"))
    sys.argv[0] = str(HERE / "kubectl-finetune")

    from finetune_cli.__main__ import main

    main()

"""Starts the command line of the bundle that this file lies in."""

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
"""Where distributions keep the authorities that they trust."""


def trust_authorities_of_the_machine() -> None:
    """Have OpenSSL find them: the bundle's is Debian's, which looks for them in one place alone."""
    named = "SSL_CERT_FILE" in os.environ or "SSL_CERT_DIR" in os.environ
    if named or OF_DEBIAN.exists() or not (HERE / "python").exists():
        return
    found = next((path for path in AUTHORITIES if path.exists()), None)
    if found is not None:
        os.environ["SSL_CERT_FILE"] = str(found)


if __name__ == "__main__":
    trust_authorities_of_the_machine()
    sys.path.insert(0, str(HERE / "lib"))
    sys.argv[0] = str(HERE / "kubectl-finetune")

    from finetune_cli.__main__ import main

    main()

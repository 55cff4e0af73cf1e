"""A minimal REST client of the API server for readiness checks: starting kubectl for each check is too slow."""

import http.client
import json
import ssl
from pathlib import Path
from typing import Any

from tools.cluster.certificates import KeyPair


class ApiReader:
    """Reads paths of the API server as the user of a client certificate. Ignores proxy settings of the environment."""

    def __init__(self, address: str, port: int, authority: Path, identity: KeyPair) -> None:
        self._address = address
        self._port = port
        self._tls = ssl.create_default_context(cafile=authority)
        self._tls.load_cert_chain(identity.certificate, identity.key)

    def connect(self) -> http.client.HTTPSConnection:
        """Return a connection for the caller's own requests; the first request opens it."""
        return http.client.HTTPSConnection(self._address, self._port, context=self._tls, timeout=10)

    def read(self, path: str) -> bytes | None:
        """Return the body at `path`, or None if the server cannot be reached or does not answer 200."""
        connection = self.connect()
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        return body if response.status == 200 else None

    def read_object(self, path: str) -> dict[str, Any] | None:
        """Return the object at `path`, or None as in `read`."""
        body = self.read(path)
        return None if body is None else json.loads(body)

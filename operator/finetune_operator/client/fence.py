"""Keeps bytes for the API server from leaving the process once another replica may hold the lease.

A check of the lease before a request is not enough: after the check, the request waits for a connection and for its turn in the
event loop, and a process that is stopped then would send the request when it continues. So the socket itself checks again. A gap
remains between that check and the system call; preconditions and fixed names make it harmless.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import aiohttp
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.rest import RESTClientObject

from finetune_operator.client.answers import NotLeadingError

Fence = Callable[[], None]
"""A function that raises NotLeadingError if no request may be sent any more. It is called very often, from any thread."""


class FencedConnections(RESTClientObject):  # type: ignore[misc]
    """The client's connections, each of which checks the fence before it sends."""

    def __init__(self, configuration: Configuration, fence: Fence) -> None:
        super().__init__(configuration)
        self._fence = fence

    def _create_connector(self) -> aiohttp.TCPConnector:
        # The number of connections is unlimited, because `Api` limits the requests.
        return aiohttp.TCPConnector(limit=0, ssl=self.ssl_context, socket_factory=self._make_socket)

    def _make_socket(self, address: tuple[Any, ...]) -> socket.socket:
        family, kind, protocol = address[:3]
        return _FencedSocket(family, kind, protocol, self._fence)


class _FencedSocket(socket.socket):
    """A socket that checks the fence in `send`: asyncio uses only this method, even under TLS, and closes the connection on
    errors.
    """

    def __init__(self, family: int, kind: int, protocol: int, fence: Fence) -> None:
        super().__init__(family, kind, protocol)
        self._fence = fence

    def send(self, *arguments: Any) -> int:
        try:
            self._fence()
        except NotLeadingError as error:
            # asyncio and aiohttp can handle a broken connection, but not this error.
            raise ConnectionAbortedError(str(error)) from error
        return super().send(*arguments)

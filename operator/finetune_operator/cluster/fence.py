"""No byte for the API server leaves the process once another replica may hold the lease.

A look at the lease before a request is not enough: between the look and the bytes the request waits for a connection and for
its turn in the event loop, and a process that is stopped there sends it when it continues. So the socket itself looks again.
What is left are the instructions between that look and the system call; for these there are preconditions and fixed names.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import aiohttp
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.rest import RESTClientObject

from finetune_operator.cluster.answers import NotLeadingError

Fence = Callable[[], None]
"""Raises NotLeadingError if a request must not be sent any more. Called very often, from any thread."""


class FencedConnections(RESTClientObject):  # type: ignore[misc]
    """The client's connections, each of which looks at the fence before it sends."""

    def __init__(self, configuration: Configuration, fence: Fence) -> None:
        super().__init__(configuration)
        self._fence = fence

    def _create_connector(self) -> aiohttp.TCPConnector:
        # Unbounded: every watch holds a connection for as long as it lasts, and `InFlight` bounds the requests.
        return aiohttp.TCPConnector(limit=0, ssl=self.ssl_context, socket_factory=self._make_socket)

    def _make_socket(self, address: tuple[Any, ...]) -> socket.socket:
        family, kind, protocol = address[:3]
        return _FencedSocket(family, kind, protocol, self._fence)


class _FencedSocket(socket.socket):
    """asyncio sends through this method alone, under TLS too. What it raises closes the connection."""

    def __init__(self, family: int, kind: int, protocol: int, fence: Fence) -> None:
        super().__init__(family, kind, protocol)
        self._fence = fence

    def send(self, *arguments: Any) -> int:
        try:
            self._fence()
        except NotLeadingError as error:
            # asyncio and aiohttp know what to do with a connection that breaks.
            raise ConnectionAbortedError(str(error)) from error
        return super().send(*arguments)

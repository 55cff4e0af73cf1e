"""Keeps bytes for the API server from leaving the process once another replica may hold the lease.

A check of the lease before a request is not enough: after it the request waits for a connection and for its turn in the event
loop, and a process that is stopped there sends it when it continues. So the socket itself checks again. A gap remains between
that check and the system call; preconditions and fixed names cover it.
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
"""Raises NotLeadingError if a request must not be sent any more. It is called very often, from any thread."""


class FencedConnections(RESTClientObject):  # type: ignore[misc]
    """The client's connections, each of which checks the fence before it sends."""

    def __init__(self, configuration: Configuration, fence: Fence) -> None:
        super().__init__(configuration)
        self._fence = fence

    def _create_connector(self) -> aiohttp.TCPConnector:
        # Unbounded: every watch holds a connection for as long as it lasts, and `RequestLimiter` bounds the requests.
        return aiohttp.TCPConnector(limit=0, ssl=self.ssl_context, socket_factory=self._make_socket)

    def _make_socket(self, address: tuple[Any, ...]) -> socket.socket:
        family, kind, protocol = address[:3]
        return _FencedSocket(family, kind, protocol, self._fence)


class _FencedSocket(socket.socket):
    """A socket that checks the fence in `send`. asyncio sends through it alone, under TLS too, and closes the connection if it
    raises.
    """

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

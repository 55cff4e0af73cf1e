"""Keeps the process from sending anything to the API server once another replica may hold the lease.

A check of the lease before each request is not enough: after the check, the request waits for a connection and for its turn in
the event loop, and a process that is paused at that point would send it when it resumes. So the socket itself checks again. A
small gap remains between this check and the system call; preconditions and fixed names make it harmless.
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
"""A function that raises NotLeadingError if requests must no longer be sent. It is called very often, from any thread."""


class FencedConnections(RESTClientObject):  # type: ignore[misc]
    """The client's connections, each of which checks the fence before it sends."""

    def __init__(self, configuration: Configuration, fence: Fence) -> None:
        super().__init__(configuration)
        self._fence = fence

    def _create_connector(self) -> aiohttp.TCPConnector:
        # No limit on connections, because `Api` already limits concurrent requests.
        return aiohttp.TCPConnector(limit=0, ssl=self.ssl_context, socket_factory=self._make_socket)

    def _make_socket(self, address: tuple[Any, ...]) -> socket.socket:
        family, kind, protocol = address[:3]
        return _FencedSocket(family, kind, protocol, self._fence)


class _FencedSocket(socket.socket):
    """A socket that checks the fence in `send`. asyncio sends only through this method, even under TLS, and closes the connection
    if it raises an error.
    """

    def __init__(self, family: int, kind: int, protocol: int, fence: Fence) -> None:
        super().__init__(family, kind, protocol)
        self._fence = fence

    def send(self, *arguments: Any) -> int:
        try:
            self._fence()
        except NotLeadingError as error:
            # asyncio and aiohttp can handle a broken connection, but not a NotLeadingError.
            raise ConnectionAbortedError(str(error)) from error
        return super().send(*arguments)

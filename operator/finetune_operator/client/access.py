"""Access to the API server for our client and kopf, through KUBECONFIG if it is set, else the pod's service account."""

from __future__ import annotations

import os
from collections.abc import Callable
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import kopf
from kubernetes.aio import config
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.rest import RESTClientObject
from yarl import URL


async def load_configuration() -> Configuration:
    """Load the settings of the connection. Raises kubernetes.aio.config.ConfigException if they cannot be found."""
    configuration = Configuration()
    if os.environ.get("KUBECONFIG"):
        await config.load_kube_config(os.environ["KUBECONFIG"], client_configuration=configuration)
    else:
        config.load_incluster_config(client_configuration=configuration)
    # Otherwise aiohttp looks up proxies and reads ~/.netrc in a thread for every request, for a seventh of all CPU time.
    configuration.client_session_kwargs = {"trust_env": False}
    configuration.proxy = configuration.proxy or proxy_from_environment(configuration.host)
    return configuration


def proxy_from_environment(url: str) -> str | None:
    """Return the proxy that the environment sets for this server, or None."""
    parts = urlsplit(url)
    if parts.hostname is None or proxy_bypass(parts.hostname):
        return None
    return getproxies().get(parts.scheme)


async def session_for_kopf(on_answer: Callable[[URL, int], None]) -> kopf.AiohttpSession:
    """Return a session for kopf's watches. kopf calls this at each login, so that expired tokens are read again.

    `on_answer` is called with URL and status of every request, as soon as the answer begins.
    """
    configuration = await load_configuration()
    tracing = aiohttp.TraceConfig()

    async def answered(_session: aiohttp.ClientSession, _context: object, parameters: aiohttp.TraceRequestEndParams) -> None:
        on_answer(parameters.url, parameters.response.status)

    tracing.on_request_end.append(answered)
    token = configuration.api_key.get("BearerToken", "")
    scheme, _, secret = token.partition(" ")
    session = aiohttp.ClientSession(
        # No limit, because every watch occupies a connection for as long as it lasts.
        connector=aiohttp.TCPConnector(limit=0, ssl=RESTClientObject(configuration).ssl_context),
        headers={"Authorization": f"{scheme.capitalize()} {secret.strip()}"} if token else {},
        proxy=configuration.proxy,
        trace_configs=[tracing],
    )
    return kopf.AiohttpSession(server=configuration.host, aiohttp_session=session)

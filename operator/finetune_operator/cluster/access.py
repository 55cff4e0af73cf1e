"""How to reach the API server: the pod's service account, else KUBECONFIG. One answer for our client and for kopf."""

from __future__ import annotations

import os

import kopf
from kubernetes.aio import config
from kubernetes.aio.client.configuration import Configuration

CONNECTIONS = 50
"""Open connections at most; beyond it requests queue here instead of at the API server."""


async def load_configuration() -> Configuration:
    """Settings of the connection. Raises kubernetes.aio.config.ConfigException where neither source is there."""
    configuration = Configuration()
    if os.environ.get("KUBECONFIG"):
        await config.load_kube_config(client_configuration=configuration)
    else:
        config.load_incluster_config(client_configuration=configuration)
    configuration.connection_pool_maxsize = CONNECTIONS
    return configuration


async def connection_for_kopf() -> kopf.ConnectionInfo:
    """The same access for kopf's watches, read anew at each login because tokens expire."""
    configuration = await load_configuration()
    scheme, _, token = configuration.api_key.get("BearerToken", "").partition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        scheme=scheme.capitalize() or None,
        token=token.strip() or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
    )

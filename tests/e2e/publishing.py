"""A registry that wants a login, a profile whose jobs may publish to it, and the Secret with the login."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.registry import Registry, running_registry
from tools.cluster import network
from tools.cluster.certificates import CertificateAuthority
from tools.stack import NAMESPACE, Stack, host_and_port

PROFILE, LOGIN_SECRET, REPOSITORY = "publishing", "registry-login", "team/tuned"
_AUTHORITIES = "company-ca"


@contextmanager
def publishing_registry(stack: Stack, directory: Path) -> Iterator[Registry]:
    """The registry, and a profile that trusts the private authority which signed its certificate."""
    authority = CertificateAuthority(directory / "authority")
    with running_registry(directory, network.BRIDGE_ADDRESS, needs_login=True, authority=authority) as running:
        trusted = {"company.pem": authority.certificate.read_text()}
        place = {"name": _AUTHORITIES, "namespace": NAMESPACE}
        stack.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": place, "data": trusted})
        profile = json.loads(stack.cluster.kubectl("get", "finetuneprofile", "default", "--output", "json"))
        publish = {"allowedDestinations": [f"oci://{running.host}/team"]}
        bundle = {"configMap": _AUTHORITIES, "key": "company.pem"}
        address, port = host_and_port(f"//{running.host}")
        named = profile["spec"]["network"]["destinations"]
        reached = {"destinations": [*named, {"cidr": f"{address}/32", "ports": [port]}]}
        stack.apply(
            {
                "apiVersion": profile["apiVersion"],
                "kind": profile["kind"],
                "metadata": {"name": PROFILE},
                "spec": profile["spec"]
                | {"publish": publish, "network": profile["spec"]["network"] | reached, "caBundle": bundle},
            }
        )
        yield running


def keep_login(stack: Stack, registry: Registry) -> None:
    """Put the registry's login into the Secret that the job names."""
    stack.apply(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "kubernetes.io/dockerconfigjson",
            "metadata": {"name": LOGIN_SECRET, "namespace": NAMESPACE},
            "stringData": {".dockerconfigjson": registry.docker_config()},
        }
    )

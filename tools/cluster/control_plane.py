"""A Kubernetes control plane: etcd, API server, controller manager and scheduler, as processes of this machine."""

import ipaddress
import os
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from finetune_cli.local.launch import PORTS
from tools.cluster.access import ClusterAccess
from tools.cluster.api import ApiReader
from tools.cluster.binaries import ensure_binaries
from tools.cluster.certificates import CertificateAuthority, KeyPair
from tools.cluster.errors import ClusterError, WaitTimeoutError, wait_until
from tools.cluster.processes import Component, log_tail, start_component, without_proxies
from tools.cluster.run_directory import RunDirectory

LOOPBACK = "127.0.0.1"

_START_SECONDS = 180.0
"""Limit for each stage of the start, which takes three seconds on an idle machine."""

_TAILS = 2
"""Number of logs that a time-out shows: those of the processes that were started last."""


@dataclass(frozen=True)
class Endpoint:
    """Where a control plane listens and which addresses it gives to Services."""

    address: str
    service_range: str
    published: bool
    """Whether the API server publishes its address as the `kubernetes` Service's endpoint, for pods."""


@dataclass(frozen=True)
class NodeLoss:
    """How soon the control plane gives up a silent node."""

    grace_seconds: int
    """Seconds until the node counts as lost."""
    toleration_seconds: int
    """Seconds from then until its pods are evicted, unless a pod sets its own toleration."""


ON_LOOPBACK = Endpoint(address=LOOPBACK, service_range="127.96.0.0/16", published=False)
"""Without nodes, no Service address is served. The loopback range keeps packets to Service addresses on this machine."""


class ControlPlane(ClusterAccess):
    """Context manager for a control plane with its own ports, certificates, directory and processes.

    Several may run at once on loopback. Logs are kept after an exception; set `keep_logs` for a failure that the context
    manager does not see. The processes end with the thread that entered the context.
    """

    def __init__(self, endpoint: Endpoint = ON_LOOPBACK, loss: NodeLoss | None = None) -> None:
        """`loss`: None for Kubernetes' default times."""
        self._endpoint = endpoint
        self._loss = loss
        self.keep_logs = False
        self.components: list[Component] = []
        """The running processes, in the order in which they were started."""

    def __enter__(self) -> "ControlPlane":
        self.binaries = ensure_binaries()
        self.run = RunDirectory()
        try:
            self._start()
        except BaseException:
            self._stop(keep_logs=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop(keep_logs=self.keep_logs or error is not None)

    def start(self, name: str, *arguments: str | Path) -> Component:
        """Start another process of this run; it ends with the control plane."""
        component = start_component(name, arguments, self.run.logs / f"{name}.log")
        self.components.append(component)
        return component

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition of the start, and check that no process of this run ends meanwhile.

        Raises:
            ClusterError: a process ended (with the end of its log), or the condition did not come true.
        """

        def watched() -> bool:
            for component in self.components:
                component.check_running()
            return condition()

        try:
            wait_until(watched, what, _START_SECONDS)
        except WaitTimeoutError as error:
            ends = "\n".join(log_tail(component.log) for component in self.components[-_TAILS:])
            raise ClusterError(f"{error}\n{ends}") from error

    def _start(self) -> None:
        address = self._endpoint.address
        ports = free_ports(address, 5)
        etcd_port, peer_port, api_port, controller_port, scheduler_port = ports
        server = f"https://{address}:{api_port}"

        self.authority = CertificateAuthority(self.run.path / "certificates")
        admin = self.authority.sign("admin", "/O=system:masters/CN=admin", "clientAuth")
        self.api = ApiReader(address, api_port, self.authority.certificate, admin)
        self.server = server
        super().__init__(
            kubeconfig=self.authority.kubeconfig("admin", server, admin),
            scratch=self.run.path,
            kubectl=(str(self.binaries.kube), "kubectl"),
            helm=(str(self.binaries.helm),),
            environment=without_proxies(os.environ),
        )

        toleration_flags: list[str] = []
        grace_flags: list[str] = []
        if (loss := self._loss) is not None:
            taints = ("not-ready", "unreachable")
            toleration_flags = [f"--default-{taint}-toleration-seconds={loss.toleration_seconds}" for taint in taints]
            grace_flags = ["--node-monitor-period=1s", f"--node-monitor-grace-period={loss.grace_seconds}s"]
        token_private, token_public = self.authority.service_account_key()
        self.start("etcd", self.binaries.kube, "etcd", *_etcd_flags(self.run.path / "etcd", etcd_port, peer_port))
        self.start(
            "kube-apiserver",
            *(self.binaries.kube, "kube-apiserver"),
            *(f"--etcd-servers=http://{LOOPBACK}:{etcd_port}", f"--secure-port={api_port}"),
            *(f"--service-account-key-file={token_public}", f"--service-account-signing-key-file={token_private}"),
            *_api_server_flags(self._endpoint, self.authority),
            *toleration_flags,
        )
        # Both exit when they start before the API server has created the bootstrap roles.
        self.wait_until(lambda: self.api.read("/readyz") is not None, "the API server to be ready")
        self.start(
            "kube-controller-manager",
            *(self.binaries.kube, "kube-controller-manager"),
            *self._client_flags("kube-controller-manager", controller_port),
            f"--service-account-private-key-file={token_private}",
            f"--root-ca-file={self.authority.certificate}",
            # Without it the controllers share one user, which may not create pods. With it each starts its own
            # clients, which at the default rate takes five seconds.
            "--use-service-account-credentials=true",
            *("--kube-api-qps=500", "--kube-api-burst=1000"),
            *grace_flags,
        )
        self.start(
            "kube-scheduler", *(self.binaries.kube, "kube-scheduler"), *self._client_flags("kube-scheduler", scheduler_port)
        )
        # Pods are refused in a namespace whose default ServiceAccount the controller manager has not made yet.
        self.wait_until(
            lambda: self.api.read("/api/v1/namespaces/default/serviceaccounts/default") is not None,
            "the controller manager to make the default ServiceAccount",
        )

    def _client_flags(self, name: str, port: int) -> list[str]:
        identity = self.authority.sign(name, f"/CN=system:{name}", "clientAuth")
        kubeconfig = self.authority.kubeconfig(name, self.server, identity)
        return [
            *(f"--kubeconfig={kubeconfig}", f"--authentication-kubeconfig={kubeconfig}"),
            *(f"--authorization-kubeconfig={kubeconfig}", f"--bind-address={LOOPBACK}"),
            *(f"--secure-port={port}", "--leader-elect=false"),
        ]

    def _stop(self, *, keep_logs: bool) -> None:
        # No process needs an orderly end. Clients are killed first, so that none logs the loss of its server.
        for component in reversed(self.components):
            component.kill()
        self.run.remove(keep_logs=keep_logs)


def _etcd_flags(data: Path, client_port: int, peer_port: int) -> list[str]:
    client, peer = f"http://{LOOPBACK}:{client_port}", f"http://{LOOPBACK}:{peer_port}"
    return [
        *("--name=etcd", f"--data-dir={data}", "--unsafe-no-fsync", "--log-level=warn"),
        *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
        *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=etcd={peer}"),
    ]


def _api_server_flags(endpoint: Endpoint, authority: CertificateAuthority) -> list[str]:
    kubernetes = ("kubernetes", "kubernetes.default", "kubernetes.default.svc")
    # The kubernetes Service always has the first address of the range.
    service_address = str(ipaddress.ip_network(endpoint.service_range)[1])
    hosts = [f"DNS:{name}" for name in ("localhost", *kubernetes)]
    hosts += [f"IP:{address}" for address in sorted({LOOPBACK, endpoint.address, service_address})]
    serving: KeyPair = authority.sign("kube-apiserver", "/CN=kube-apiserver", "serverAuth", hosts)
    to_kubelet = authority.sign("kubelet-client", "/O=system:masters/CN=kube-apiserver-kubelet-client", "clientAuth")
    flags = [
        *(f"--bind-address={endpoint.address}", f"--advertise-address={endpoint.address}"),
        f"--service-cluster-ip-range={endpoint.service_range}",
        *(f"--tls-cert-file={serving.certificate}", f"--tls-private-key-file={serving.key}"),
        f"--client-ca-file={authority.certificate}",
        f"--kubelet-client-certificate={to_kubelet.certificate}",
        f"--kubelet-client-key={to_kubelet.key}",
        f"--kubelet-certificate-authority={authority.certificate}",
        "--kubelet-preferred-address-types=InternalIP",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        *("--authorization-mode=Node,RBAC", "--allow-privileged=true", "--profiling=false"),
    ]
    if not endpoint.published:
        flags.append("--endpoint-reconciler-type=none")  # a loopback address is no valid endpoint
    return flags


def free_ports(address: str, count: int) -> list[int]:
    """Choose free ports at `address` and at loopback. They are random, because other runs choose at the same time."""
    chosen: list[int] = []
    for port in random.sample(PORTS, k=len(PORTS)):
        if all(_is_free(host, port) for host in {address, LOOPBACK}):
            chosen.append(port)
        if len(chosen) == count:
            return chosen
    raise ClusterError(f"fewer than {count} free ports between {PORTS.start} and {PORTS.stop} at {address}")


def _is_free(address: str, port: int) -> bool:
    with socket.socket() as candidate:
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind((address, port))
        except OSError:
            return False
    return True

"""What is around a running job on real nodes, each place with a listener: what its pods must not reach, and who may reach them.

Everything is looked at from inside the job's own pods, while they stand still.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from finetune_job.names import LABEL_JOB_UID, LABEL_MANAGED_BY, LABEL_ROLE, OBSERVE_PORT, RENDEZVOUS_PORT, Role
from tests.e2e.pod_network import OWN_NAMESPACE, Address, Answer, listening, node_namespace, pod_namespace, reached_from, stopped
from tools.cluster import network
from tools.cluster.control_plane import free_ports
from tools.cluster.errors import ClusterError, wait_until
from tools.stack import MONITORING_NAMESPACE, NAMESPACE, Stack, host_and_port

OTHER_NAMESPACE = "other-team"
METADATA_ADDRESS, PUBLIC_ADDRESS = "169.254.169.254", "203.0.113.7"
_METADATA_PORT, _DNS_PORT, _KUBELET_PORT, _UNUSED_PORT, _OPERATOR_PORT = 80, 53, 10250, 1, 8080
_PROGRAM = "finetune_trainer"
_START_SECONDS = 600.0
RESTRICTED_CONTAINER = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "seccompProfile": {"type": "RuntimeDefault"},
}


class Surroundings:
    """The places, open to everybody who is not kept from them by a policy of his own."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack

    @contextmanager
    def standing(self) -> Iterator[Surroundings]:
        """Make the places and take them away at the end."""
        cluster = self._stack.cluster
        for namespace in (OTHER_NAMESPACE, MONITORING_NAMESPACE):
            cluster.kubectl("create", "namespace", namespace)
        # A rank of another run as far as its labels go, and its own policies let everybody in.
        labels = {LABEL_MANAGED_BY: "finetune-operator", LABEL_JOB_UID: "another", LABEL_ROLE: Role.TRAIN.value}
        self.neighbour = self._pod("neighbour", NAMESPACE, labels)
        self.foreigner = self._pod("foreigner", OTHER_NAMESPACE, {})
        self.monitoring = self._pod("prometheus", MONITORING_NAMESPACE, {})
        # Nobody has named it, but a pod could guess it.
        (self._unnamed_port,) = free_ports(network.BRIDGE_ADDRESS, 1)
        with ExitStack() as context:
            for pod in (self.neighbour, self.foreigner):
                ports = [RENDEZVOUS_PORT, OBSERVE_PORT, _DNS_PORT]
                context.enter_context(listening(pod_namespace(pod), pod["status"]["podIP"], ports))
            places = [node.place for node in cluster.nodes]
            context.enter_context(network.outside_address(PUBLIC_ADDRESS, places))
            for place in places:
                context.enter_context(network.address_of_node(METADATA_ADDRESS, place))
                context.enter_context(listening(node_namespace(place), METADATA_ADDRESS, [_METADATA_PORT]))
            context.enter_context(listening(OWN_NAMESPACE, PUBLIC_ADDRESS, [443]))
            context.enter_context(listening(OWN_NAMESPACE, network.BRIDGE_ADDRESS, [self._unnamed_port]))
            yield self
        cluster.kubectl("delete", "pod", "neighbour", "--namespace", NAMESPACE, "--grace-period=1")
        cluster.kubectl("delete", "namespace", OTHER_NAMESPACE, MONITORING_NAMESPACE, "--wait=false")

    def places(self) -> dict[str, Address]:
        """Everything that is there, by name."""
        first, second = (node.place.address for node in self._stack.cluster.nodes)
        neighbour, foreigner = self.neighbour["status"]["podIP"], self.foreigner["status"]["podIP"]
        return {
            "another run's rendezvous": (neighbour, RENDEZVOUS_PORT),
            "another run's metrics": (neighbour, OBSERVE_PORT),
            "port 53 of a pod of the namespace": (neighbour, _DNS_PORT),
            "another namespace's pod": (foreigner, RENDEZVOUS_PORT),
            "port 9400 of another namespace": (foreigner, OBSERVE_PORT),
            "port 53 of another namespace": (foreigner, _DNS_PORT),
            "the operator": (self._stack.operator_pod()["status"]["podIP"], _OPERATOR_PORT),
            "the first node's kubelet": (first, _KUBELET_PORT),
            "the second node's kubelet": (second, _KUBELET_PORT),
            "port 53 of a node": (first, _DNS_PORT),
            "the API server's Service": ("10.96.0.1", 443),
            "the API server": host_and_port(self._stack.cluster.control_plane.server),
            "the metadata service": (METADATA_ADDRESS, _METADATA_PORT),
            "a private address that no profile names": (network.BRIDGE_ADDRESS, self._unnamed_port),
            "the object store": host_and_port(self._stack.s3.address),
            "a public address": (PUBLIC_ADDRESS, 443),
        }

    def from_outside(self) -> dict[str, Answer]:
        """What a pod reaches that no policy speaks of: if another reaches less, it is not the fault of the places."""
        return reached_from(pod_namespace(self.monitoring), self.places())

    def from_operator(self) -> dict[str, Answer]:
        """What the operator reaches."""
        self._stack.policies.settle()
        return reached_from(pod_namespace(self._stack.operator_pod()), self.places())

    def readers_of_operator(self) -> dict[str, dict[str, Answer]]:
        """Who reaches the port of the operator's metrics, by the one who asks, and that the asker has a way out at all."""
        self._stack.policies.settle()
        targets = {name: self.places()[name] for name in ("the operator", "a public address")}
        askers = {"monitoring": self.monitoring, "the neighbour": self.neighbour, "the foreigner": self.foreigner}
        return {name: reached_from(pod_namespace(pod), targets) for name, pod in askers.items()}

    def from_role(self, name: str, role: Role) -> dict[str, Answer]:
        """What the first pod of a role reaches; waits for its start."""
        pod = wait_until(lambda: next(iter(self._stack.pods(name, role)), None), f"a pod of {role}", _START_SECONDS)
        with self._still(pod):
            return reached_from(pod_namespace(pod), self.places())

    def of_gang(self, name: str) -> dict[str, dict[str, Answer]]:
        """What ranks reach, by place; and who reaches rank 0, by the one who asks."""
        first, second = sorted(self._stack.pods(name, Role.TRAIN), key=lambda pod: str(pod["metadata"]["name"]))
        with self._still(first), self._still(second):
            first_address, second_address = first["status"]["podIP"], second["status"]["podIP"]
            ports = {"rendezvous": (first_address, RENDEZVOUS_PORT), "metrics": (first_address, OBSERVE_PORT)}
            questions: dict[str, tuple[dict[str, Any], dict[str, Address]]] = {
                "around": (second, self.places()),
                "rank 0": (first, {"unused port of rank 1": (second_address, _UNUSED_PORT)}),
                "rank 1": (second, ports),
                "the neighbour": (self.neighbour, ports),
                "the foreigner": (self.foreigner, ports),
                "monitoring": (self.monitoring, ports),
                "the operator": (self._stack.operator_pod(), ports),
            }
            with concurrent.futures.ThreadPoolExecutor(len(questions)) as threads:
                asked = {
                    name: threads.submit(reached_from, pod_namespace(pod), targets) for name, (pod, targets) in questions.items()
                }
            return {name: answer.result() for name, answer in asked.items()}

    @contextmanager
    def _still(self, pod: Mapping[str, Any]) -> Iterator[None]:
        """Let a pod stand still with its policies enforced."""
        name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        with stopped(pod, _PROGRAM):
            wait_until(lambda: self._read(name, namespace)["status"].get("podIP"), f"the address of {name}", _START_SECONDS)
            self._stack.policies.settle()
            yield

    def _pod(self, name: str, namespace: str, labels: dict[str, str]) -> dict[str, Any]:
        container = {
            "name": "probe",
            "image": self._stack.cluster.probe_image,
            "args": ["pause"],
            "securityContext": RESTRICTED_CONTAINER,
        }
        metadata = {"name": name, "namespace": namespace, "labels": labels}
        self._stack.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}})
        self._stack.cluster.kubectl("wait", f"pod/{name}", "--namespace", namespace, "--for=condition=Ready", "--timeout=120s")
        return self._read(name, namespace)

    def _read(self, name: str, namespace: str) -> dict[str, Any]:
        found = self._stack.cluster.control_plane.api.read_object(f"/api/v1/namespaces/{namespace}/pods/{name}")
        if found is None:
            raise ClusterError(f"pod {name} is not there")
        return found

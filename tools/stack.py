"""Installs the product on real nodes, as a platform team would (cluster, images, chart, claims), and applies jobs.

The end-to-end tests, `make demo-cluster` and `make bench-chain` use it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import yaml

from finetune_job.names import LABEL_JOB, LABEL_ROLE, Role
from tools import images
from tools.cluster import network
from tools.cluster.errors import ClusterError, wait_until
from tools.cluster.node_cluster import NodeCluster
from tools.cluster.processes import run_command
from tools.s3 import REGION, running_s3
from tools.volumes import bound_claim, storage_class, volume

ROOT = Path(__file__).resolve().parents[1]
SYSTEM_NAMESPACE = "finetune-system"
NAMESPACE = "team"
MONITORING_NAMESPACE = "monitoring"
"""Namespace whose pods may read metrics; a test that needs it creates it."""
RESTRICTED = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn", "audit")}
USER_ID = 1000650000
"""User id of pods, as assigned by platforms that give each namespace its own range."""
CLAIMS = ("models", "data", "models-out", "workspace")
SHARED_VOLUMES = 6
"""Number of volumes of the default storage class, for workspace claims from a template."""
STORAGE_CLASS = "shared"
RELEASE = "finetune"
DNS = f"{network.BRIDGE_ADDRESS}/32"
_ROLE_RESOURCES = {"cpu": "100m", "memory": "3Gi", "sharedMemory": "256Mi"}
"""Small requests, so that two training pods and the operator fit on a node of two cores; the kubelet enforces no CPU quota."""
_END_SECONDS = 900.0


class Stack:
    """Context manager: nodes with the operator installed and a namespace whose claims hold the quickstart's inputs.

    The operator runs on the first node, so that the loss of another node does not affect it. `values`: further chart values.
    """

    def __init__(self, nodes: int = 1, **values: Any) -> None:
        self._num_nodes = nodes
        self._values = values

    def __enter__(self) -> Stack:
        with ExitStack() as stack:
            self.directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="finetune-stack-")))
            # The pods' user comes from outside and must be able to reach the volumes.
            self.directory.chmod(0o755)
            trainer, operator = images.build("trainer"), images.build("operator")
            self.cluster = stack.enter_context(NodeCluster(self._num_nodes))
            self._enforcement = stack.enter_context(ExitStack())
            self.policies = self._enforcement.enter_context(self.cluster.enforced_policies())
            self.s3 = stack.enter_context(
                running_s3(self.cluster.control_plane.binaries.versitygw, self.directory / "s3", network.BRIDGE_ADDRESS)
            )
            for image in (trainer, operator):
                if not self.cluster.has_image(image.reference):
                    with image.archive(self.cluster.node.images.blobs()) as archive:
                        self.cluster.load_image(archive, image.reference)
            for _ in range(self._num_nodes - 1):
                self.cluster.add_node()
            self.trainer_image, self.operator_image = trainer.reference, operator.reference
            try:
                self._make_claims()
                self._install()
            except BaseException:
                self.describe(sys.stderr.write)
                raise
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.describe(sys.stderr.write)
        self.cluster.keep_logs = self.cluster.keep_logs or error is not None
        self._stack.__exit__(kind, error, trace)

    def claim(self, name: str) -> Path:
        """Directory behind a claim of the namespace."""
        return self.directory / "claims" / name

    def workspace(self, name: str) -> Path:
        """Directory of a job on the volume that its workspace claim was bound to."""
        directories = list(self.directory.glob(f"claims/*/{name}-????????"))
        if len(directories) != 1:
            raise ClusterError(f"{name} has {len(directories)} workspace directories: {directories}")
        return directories[0]

    def _make_claims(self) -> None:
        claims = self.directory / "claims"
        subprocess.run([sys.executable, "-m", "tools.quickstart", claims], cwd=ROOT, check=True)
        self.cluster.kubectl("create", "namespace", NAMESPACE)
        self.cluster.kubectl("label", "namespace", NAMESPACE, *(f"{key}={value}" for key, value in RESTRICTED.items()))
        self.apply(storage_class(STORAGE_CLASS, is_default=True))
        for name in CLAIMS:
            (claims / name).mkdir(exist_ok=True)
            self.apply(volume(NAMESPACE, name, claims / name, storage_class=""), bound_claim(NAMESPACE, name))
        for number in range(SHARED_VOLUMES):
            directory = claims / f"shared-{number}"
            directory.mkdir()
            self.apply(volume(NAMESPACE, directory.name, directory, storage_class=STORAGE_CLASS))
        # Like a new volume: owned by root, and writable only for root. Pods may write because of the group from the profile.
        for path in [claims, *claims.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)

    def _install(self) -> None:
        host, port = host_and_port(self.s3.address)
        api_host, api_port = host_and_port(self.cluster.control_plane.server)
        repository, _, tag = self.operator_image.rpartition(":")
        values = {
            "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
            "nodeSelector": {"kubernetes.io/hostname": self.cluster.node.place.name},
            "networkPolicy": {
                "create": True,
                "apiServerCIDRs": [f"{api_host}/32"],
                "apiServerPorts": [api_port],
                "dnsTo": [{"ipBlock": {"cidr": DNS}}],
                "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": MONITORING_NAMESPACE}}}],
            },
            # For a test whose image arrives late.
            "admission": {"operator": {"images": ["docker.io/library"]}},
            "profiles": {
                "default": {
                    "trainerImage": self.trainer_image,
                    "imagePullPolicy": "Never",
                    "runAsUser": USER_ID,
                    "scratchStorage": "1Gi",
                    "network": {
                        "destinations": [{"cidr": f"{host}/32", "ports": [port]}],
                        "dns": {"namespaces": [], "cidrs": [DNS]},
                        "metricsNamespaces": [MONITORING_NAMESPACE],
                    },
                    "fetch": {"s3Endpoint": self.s3.address, "s3Region": REGION, "allowedSources": ["s3://"]},
                    "resources": {role.value: _ROLE_RESOURCES for role in Role},
                }
            },
        }
        file = self.directory / "values.yaml"
        file.write_text(json.dumps(values | self._values))
        self.cluster.kubectl("create", "namespace", SYSTEM_NAMESPACE)
        self.cluster.kubectl("label", "namespace", SYSTEM_NAMESPACE, *(f"{key}={value}" for key, value in RESTRICTED.items()))
        self.cluster.helm(
            *("install", RELEASE, ROOT / "charts/finetune-operator", "--namespace", SYSTEM_NAMESPACE),
            *("--values", file, "--wait", "--timeout", "5m"),
        )

    def apply(self, *documents: dict[str, Any]) -> None:
        """`kubectl apply` of objects."""
        # As JSON: PyYAML leaves a string such as "1e-2" bare, which Kubernetes reads as a number.
        self.cluster.kubectl("apply", "-f", "-", input="\n".join(map(json.dumps, documents)))

    def upload(self, bucket: str, directory: Path) -> str:
        """Upload the files of a directory to a bucket of the object store. Returns the name of a Secret with its credentials."""
        self.s3.upload(bucket, {str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.glob("*.*"))})
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": bucket, "namespace": NAMESPACE}}
        self.apply({**secret, "stringData": self.s3.environment()})
        return bucket

    def apply_example(self, path: str, spec: dict[str, Any] | None = None, **metadata: str) -> str:
        """Apply an example of the project in the namespace. `spec` replaces parts of its spec, and `metadata` of its metadata.

        Returns the job's name.
        """
        document = yaml.safe_load((ROOT / path).read_text())
        document["metadata"] |= {"namespace": NAMESPACE, **metadata}
        document["spec"] |= spec or {}
        if "name" in metadata and "output" not in (spec or {}):
            document["spec"]["output"]["destination"] = f"pvc://models-out/{metadata['name']}"
        self.apply(document)
        return str(document["metadata"]["name"])

    def objects(self, kind: str, selector: str = "", namespace: str = NAMESPACE) -> list[dict[str, Any]]:
        """All objects of a kind that match a label selector."""
        arguments = ["get", kind, "--namespace", namespace, "--output", "json", *(["--selector", selector] if selector else [])]
        items: list[dict[str, Any]] = json.loads(self.cluster.kubectl(*arguments))["items"]
        return items

    def job(self, name: str) -> dict[str, Any]:
        """The FineTuneJob."""
        document: dict[str, Any] = json.loads(
            self.cluster.kubectl("get", "finetunejob", name, "--namespace", NAMESPACE, "--output", "json")
        )
        return document

    def batch_jobs(self, name: str, role: Role | None = None) -> list[dict[str, Any]]:
        """The batch Jobs of a FineTuneJob, of one role or all."""
        return self.objects("jobs", f"{LABEL_JOB}={name}" + (f",{LABEL_ROLE}={role}" if role else ""))

    def pods(self, name: str, role: Role) -> list[dict[str, Any]]:
        """The pods of a role."""
        return self.objects("pods", f"{LABEL_JOB}={name},{LABEL_ROLE}={role}")

    @contextmanager
    def without_enforcement(self) -> Iterator[None]:
        """Let all pods reach each other, as on a cluster whose network does not enforce policies."""
        self._enforcement.close()
        try:
            yield
        finally:
            self.policies = self._enforcement.enter_context(self.cluster.enforced_policies())

    def operator_pod(self) -> dict[str, Any]:
        """The running pod of the operator."""
        (pod,) = [
            pod
            for pod in self.objects("pods", "app.kubernetes.io/name=finetune-operator", SYSTEM_NAMESPACE)
            if pod["status"].get("containerStatuses", [{}])[0].get("state", {}).get("running")
        ]
        return pod

    def wait(self, condition: Callable[[], Any], what: str, seconds: float = _END_SECONDS) -> Any:
        """Wait for a condition. Raises ClusterError with `what` if it does not come true in time."""
        return wait_until(_slowly(condition), what, seconds)

    def wait_for_condition(self, name: str, *kinds: str) -> dict[str, Any]:
        """Wait until one of the conditions is True, and return the job."""

        def reached() -> dict[str, Any] | None:
            job = self.job(name)
            return job if any(condition_of(job, kind).get("status") == "True" for kind in kinds) else None

        job: dict[str, Any] = self.wait(reached, f"{name} to be {' or '.join(kinds)}")
        return job

    def wait_for_step(self, name: str, step: int) -> None:
        """Wait until status shows that training has reached a step."""
        self.wait(lambda: self.job(name).get("status", {}).get("progress", {}).get("step", 0) >= step, f"step {step} of {name}")

    def kill_container(self, pod: dict[str, Any]) -> None:
        """SIGKILL the first process of a running pod's container, as the kernel does when memory runs out."""
        container = pod["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]
        node = self.cluster.node_named(pod["spec"]["nodeName"])
        run_command(*node.command("kill", "-KILL", str(node.images.main_process(container))))

    def describe(self, write: Callable[[str], Any]) -> None:
        """Print what a person would look at first."""
        for arguments in (
            ("get", "finetunejobs,jobs,pods", "--all-namespaces", "--output", "wide"),
            ("get", "finetunejobs", "--all-namespaces", "--output", "yaml"),
            ("get", "events", "--all-namespaces", "--sort-by=.lastTimestamp"),
            ("logs", "--namespace", SYSTEM_NAMESPACE, "--selector", "app.kubernetes.io/name=finetune-operator", "--tail=200"),
            ("logs", "--namespace", SYSTEM_NAMESPACE, "--selector", "app.kubernetes.io/name=finetune-operator", "--previous"),
        ):
            try:
                write(f"\n$ kubectl {' '.join(arguments)}\n{self.cluster.kubectl(*arguments)[-20000:]}\n")
            except ClusterError as error:
                write(f"{error}\n")
        logs = [log for log in self.directory.glob("claims/*/*/logs/**/*") if log.is_file()]
        logs.sort(key=lambda log: log.stat().st_mtime)
        for log in logs[-6:]:
            write(f"\n--- {log.relative_to(self.directory)}\n{log.read_text(errors='replace')[-3000:]}\n")
        kept = Path(tempfile.gettempdir()) / f"finetune-stack-logs-{os.getpid()}"
        for log in logs:
            target = kept / log.relative_to(self.directory)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(log, target)
        write(f"\nlogs of all ranks: {kept}\n")


def condition_of(job: dict[str, Any], kind: str) -> dict[str, Any]:
    """One condition of a job; empty if the job does not have it yet."""
    return next((item for item in job.get("status", {}).get("conditions", []) if item["type"] == kind), {})


def _slowly(condition: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap a condition so that it is checked at most twice a second, because each check starts a program."""
    last = 0.0

    def checked() -> Any:
        nonlocal last
        time.sleep(max(0.0, last + 0.5 - time.monotonic()))
        result = condition()
        last = time.monotonic()
        return result

    return checked


def host_and_port(url: str) -> tuple[str, int]:
    """Return host and port of a URL that has both."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port

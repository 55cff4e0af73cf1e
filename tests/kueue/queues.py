"""What an administrator of Kueue does for one namespace: flavors, quota, queues, priorities, and other people's Jobs."""

from dataclasses import dataclass
from typing import Any

from finetune_job.names import Role
from tests.integration.kube import Document, Kube
from tests.integration.workload import Workload

PLENTY = {"cpu": "1000", "memory": "10Ti", "ephemeral-storage": "10Ti"}
"""Of all that pods of the default profile ask for; it has no accelerators."""
POOL = "spot"


@dataclass(frozen=True)
class Queues:
    """Names are those of the namespace, so that tests do not meet."""

    kube: Kube
    workload: Workload

    @property
    def name(self) -> str:
        """Of the flavor and of the ClusterQueue."""
        return self.workload.namespace

    def make(
        self, local_queue: str = "gpus", *, strategy: str = "BestEffortFIFO", flavor: Document | None = None, **quota: str
    ) -> None:
        """A LocalQueue with a quota of its own, plenty but for `quota`; a younger Job of higher priority takes from a lower
        one. `flavor`: None: of nodes of a pool."""
        taint = {"key": POOL, "operator": "Exists", "effect": "NoSchedule"}
        of_pool = {"nodeLabels": {"pool": POOL}, "tolerations": [taint]}
        self._create("ResourceFlavor", self.name, {"spec": of_pool if flavor is None else flavor})
        spec = {
            "namespaceSelector": {},
            "queueingStrategy": strategy,
            "resourceGroups": [self._group(quota)],
            "preemption": {"withinClusterQueue": "LowerPriority"},
        }
        self._create("ClusterQueue", self.name, {"spec": spec})
        self._create("LocalQueue", local_queue, {"spec": {"clusterQueue": self.name}}, self.workload.namespace)

    def set_quota(self, **quota: str) -> None:
        """Plenty but for `quota`."""
        self.kube.patch("ClusterQueue", "", self.name, {"spec": {"resourceGroups": [self._group(quota)]}})

    def make_priority(self, name: str, value: int) -> None:
        """A WorkloadPriorityClass, which may be there from another test."""
        if self.kube.get("WorkloadPriorityClass", "", name) is None:
            self._create("WorkloadPriorityClass", name, {"value": value})

    def num_waiting(self) -> int:
        """Workloads that wait in the queue, as Kueue counts them."""
        found = self.kube.get("ClusterQueue", "", self.name)
        assert found is not None
        count: int = found["status"].get("pendingWorkloads", 0)
        return count

    def make_profile(self, name: str, **settings: Any) -> None:
        """The default profile with other settings, which may be there from another test."""
        if self.kube.get("FineTuneProfile", "", name) is None:
            default = self.kube.get("FineTuneProfile", "", "default")
            assert default is not None
            self.kube.create("FineTuneProfile", "", {**default, "metadata": {"name": name}, "spec": default["spec"] | settings})

    def job(self, role: Role, attempt: int = 0) -> Document:
        """The Job of a role and attempt, once it is there."""
        name = f"tune-{role}-{attempt}"
        found: Document = self.workload.wait(lambda: self.kube.get("Job", self.workload.namespace, name), f"Job {name}")
        return found

    def cpu_of_training(self) -> str:
        """What the pod of a training Job asks for."""
        (container,) = self.job(Role.TRAIN)["spec"]["template"]["spec"]["containers"]
        amount: str = container["resources"]["requests"]["cpu"]
        return amount

    def kueues_view(self, role: Role, attempt: int = 0) -> Document:
        """Kueue's Workload of the Job of a role and attempt."""
        uid = self.job(role, attempt)["metadata"]["uid"]

        def found() -> Document | None:
            listed = self.kube.list("Workload", self.workload.namespace, f"kueue.x-k8s.io/job-uid={uid}")
            return listed[0] if listed else None

        seen: Document = self.workload.wait(found, f"Kueue's Workload of {role} attempt {attempt}")
        return seen

    def other_job(self, priority: str, cpu: str) -> None:
        """Somebody else's Job in the same queue."""
        labels = {"kueue.x-k8s.io/queue-name": "gpus", "kueue.x-k8s.io/priority-class": priority}
        container = {"name": "main", "image": "registry.example/other", "resources": {"limits": {"cpu": cpu}}}
        template = {"spec": {"containers": [container], "restartPolicy": "Never"}}
        spec = {"suspend": True, "template": template}
        self.kube.create("Job", self.workload.namespace, {"metadata": {"name": "other", "labels": labels}, "spec": spec})

    def remove(self) -> None:
        """The queue and its quota; the LocalQueue goes with its namespace."""
        for kind in ("ClusterQueue", "ResourceFlavor"):
            self.kube.delete(kind, "", self.name)

    def _create(self, kind: str, name: str, content: dict[str, Any], namespace: str = "") -> None:
        head = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind, "metadata": {"name": name}}
        self.kube.create(kind, namespace, head | content)

    def _group(self, quota: dict[str, str]) -> dict[str, Any]:
        amounts = PLENTY | quota
        resources = [{"name": name, "nominalQuota": amount} for name, amount in amounts.items()]
        return {"coveredResources": list(amounts), "flavors": [{"name": self.name, "resources": resources}]}

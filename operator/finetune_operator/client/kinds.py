"""The kinds of objects that the operator reads or writes, and their paths on the API server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from finetune_job.names import GROUP, JOB_KIND, JOB_PLURAL, LABEL_MANAGED_BY, MANAGED_BY, PROFILE_KIND, PROFILE_PLURAL, VERSION


class JobKey(NamedTuple):
    """Namespace and name of a FineTuneJob, which identify it in the work queue."""

    namespace: str
    name: str


CHILDREN_SELECTOR = f"{LABEL_MANAGED_BY}={MANAGED_BY}"


@dataclass(frozen=True)
class Kind:
    """A resource type of the Kubernetes API."""

    group: str
    """Name of the API group; empty for the core group."""
    version: str
    plural: str
    name: str
    """The `kind` in manifests."""
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """The `apiVersion` in manifests."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def root(self) -> str:
        """Path of the group and version."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """Path of a collection or, if a name is given, of an object."""
        parts = [self.root]
        if self.namespaced and namespace is not None:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        parts += [part for part in (name, subresource) if part is not None]
        return "/".join(parts)


JOBS = Kind(GROUP, VERSION, JOB_PLURAL, JOB_KIND)
PROFILES = Kind(GROUP, VERSION, PROFILE_PLURAL, PROFILE_KIND, namespaced=False)
BATCH_JOBS = Kind("batch", "v1", "jobs", "Job")
PODS = Kind("", "v1", "pods", "Pod")
CONFIG_MAPS = Kind("", "v1", "configmaps", "ConfigMap")
SERVICES = Kind("", "v1", "services", "Service")
CLAIMS = Kind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
EVENTS = Kind("", "v1", "events", "Event")
LEASES = Kind("coordination.k8s.io", "v1", "leases", "Lease")
NETWORK_POLICIES = Kind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
NAMESPACES = Kind("", "v1", "namespaces", "Namespace", namespaced=False)
NODES = Kind("", "v1", "nodes", "Node", namespaced=False)
CLUSTER_ROLES = Kind("rbac.authorization.k8s.io", "v1", "clusterroles", "ClusterRole", namespaced=False)

CHILDREN = (BATCH_JOBS, PODS, CONFIG_MAPS, SERVICES)
"""Kinds of children that are watched, with a label selector."""
CACHED = (PROFILES, JOBS, *CHILDREN)
"""Kinds that the cache holds, in the order in which they are first listed: profiles before jobs, owners before children."""
WATCHED = (*CACHED, EVENTS)
WARNINGS_SELECTOR = "type=Warning"
"""Field selector for the watch of Events."""
CHILD_KINDS = {kind.name: kind for kind in (BATCH_JOBS, CONFIG_MAPS, SERVICES, CLAIMS, NETWORK_POLICIES)}
"""Kinds that may be created for a job."""
DELETED_KINDS = {**CHILD_KINDS, PODS.name: PODS}
"""Kinds that may be deleted for a job. A pod is only deleted if nothing controls it or its node is lost."""


def selector_of(kind: Kind) -> str | None:
    """Label selector for listing and watching a kind; None for all objects of the kind."""
    return CHILDREN_SELECTOR if kind in CHILDREN else None

"""A client for tests: plain dicts over the API server's REST interface, as administrator or as somebody else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kubernetes.config import new_client_from_config
from urllib3 import HTTPHeaderDict

Document = dict[str, Any]
PLURALS = {
    "FineTuneJob": "/apis/finetune.dev/v1alpha1/{}finetunejobs",
    "FineTuneProfile": "/apis/finetune.dev/v1alpha1/finetuneprofiles",
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
    "Job": "/apis/batch/v1/{}jobs",
    "Pod": "/api/v1/{}pods",
    "ConfigMap": "/api/v1/{}configmaps",
    "Service": "/api/v1/{}services",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/{}networkpolicies",
    "Event": "/api/v1/{}events",
    "PersistentVolumeClaim": "/api/v1/{}persistentvolumeclaims",
    "Namespace": "/api/v1/namespaces",
    "Node": "/api/v1/nodes",
    "ServiceAccount": "/api/v1/{}serviceaccounts",
    "Deployment": "/apis/apps/v1/{}deployments",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "Role": "/apis/rbac.authorization.k8s.io/v1/{}roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/{}rolebindings",
    "ResourceQuota": "/api/v1/{}resourcequotas",
    "Workload": "/apis/kueue.x-k8s.io/v1beta2/{}workloads",
    "LocalQueue": "/apis/kueue.x-k8s.io/v1beta2/{}localqueues",
    "ClusterQueue": "/apis/kueue.x-k8s.io/v1beta2/clusterqueues",
    "ResourceFlavor": "/apis/kueue.x-k8s.io/v1beta2/resourceflavors",
    "WorkloadPriorityClass": "/apis/kueue.x-k8s.io/v1beta2/workloadpriorityclasses",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "SubjectAccessReview": "/apis/authorization.k8s.io/v1/subjectaccessreviews",
    "Lease": "/apis/coordination.k8s.io/v1/{}leases",
}


class RefusedError(Exception):
    """The API server did not answer 2xx."""

    def __init__(self, code: int, body: str) -> None:
        super().__init__(f"{code}: {body}")
        self.code = code


class Kube:
    """`user`, `groups`: impersonate this user, as a member of these groups."""

    def __init__(self, kubeconfig: Path, user: str = "", groups: tuple[str, ...] = ()) -> None:
        self._client = new_client_from_config(config_file=str(kubeconfig))
        self._kubeconfig = kubeconfig
        self._user = user
        self._groups = groups

    def acting_as(self, user: str, groups: tuple[str, ...] = ()) -> Kube:
        """The same cluster with another user's rights."""
        return Kube(self._kubeconfig, user, groups)

    def request(self, method: str, path: str, body: Document | None = None, content_type: str = "application/json") -> Document:
        """One request; raises RefusedError."""
        headers = HTTPHeaderDict({"Content-Type": content_type, "Accept": "application/json"})
        if self._user:
            headers["Impersonate-User"] = self._user
        for group in self._groups:
            headers.add("Impersonate-Group", group)
        # Client certificates are the connection's; a token travels with each request.
        token = self._client.configuration.auth_settings().get("BearerToken")
        if token is not None:
            headers[token["key"]] = token["value"]
        answer = self._client.rest_client.pool_manager.request(
            method,
            self._client.configuration.host + path,
            body=None if body is None else json.dumps(body),
            headers=headers,
            timeout=30.0,
        )
        text = answer.data.decode()
        if not 200 <= answer.status < 300:
            raise RefusedError(answer.status, text)
        document: Document = json.loads(text)
        return document

    def path(self, kind: str, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Path of a collection or object."""
        root = PLURALS[kind].format(f"namespaces/{namespace}/" if namespace else "")
        return "/".join(part for part in (root, name, subresource) if part)

    def get(self, kind: str, namespace: str, name: str) -> Document | None:
        """The object, or None."""
        try:
            return self.request("GET", self.path(kind, namespace, name))
        except RefusedError as refusal:
            if refusal.code == 404:
                return None
            raise

    def list(self, kind: str, namespace: str, selector: str = "") -> list[Document]:
        """All objects, by name."""
        query = f"?labelSelector={selector}" if selector else ""
        items: list[Document] = self.request("GET", self.path(kind, namespace) + query)["items"]
        return sorted(items, key=lambda item: item["metadata"]["name"])

    def may_list(self, kind: str, namespace: str) -> bool:
        """Whether this user's rights suffice; roles are aggregated a moment after they are made."""
        try:
            self.list(kind, namespace)
        except RefusedError as refusal:
            if refusal.code == 403:
                return False
            raise
        return True

    def create(self, kind: str, namespace: str, body: Document, validation: str = "Strict") -> Document:
        """Create with strict field validation, as kubectl does, or with another."""
        return self.request("POST", self.path(kind, namespace) + f"?fieldValidation={validation}", body)

    def patch(self, kind: str, namespace: str, name: str, patch: Document, subresource: str = "") -> Document:
        """JSON merge patch."""
        path = self.path(kind, namespace, name, subresource)
        return self.request("PATCH", path, patch, "application/merge-patch+json")

    def delete(self, kind: str, namespace: str, name: str, policy: str = "Background") -> None:
        """Delete, in the background unless told otherwise; no error where it is gone."""
        try:
            self.request("DELETE", self.path(kind, namespace, name), {"propagationPolicy": policy})
        except RefusedError as refusal:
            if refusal.code != 404:
                raise

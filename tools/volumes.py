"""Volumes on directories of this machine, which every node can access, and claims on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_SIZE = "10Gi"

_EVERY_NODE = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]}]}]}


def volume(namespace: str, name: str, directory: Path, *, storage_class: str, size: str = _SIZE) -> dict[str, Any]:
    """Return a volume on a directory of this machine. Without a storage class, it is reserved for the claim of the same name.

    It is a local volume: unlike for hostPath volumes, the kubelet requires that the directory exists, and gives its files to the
    `fsGroup` of a pod.
    """
    reserved = {} if storage_class else {"claimRef": {"namespace": namespace, "name": name}}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"{namespace}-{name}"},
        "spec": {
            "capacity": {"storage": size},
            "accessModes": ["ReadWriteMany"],
            "local": {"path": str(directory)},
            "nodeAffinity": {"required": _EVERY_NODE},
            "storageClassName": storage_class,
            **reserved,
        },
    }


def storage_class(name: str, *, is_default: bool = False) -> dict[str, Any]:
    """Return a storage class whose volumes are created beforehand."""
    annotations = {"storageclass.kubernetes.io/is-default-class": "true"} if is_default else {}
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": name, "annotations": annotations},
        "provisioner": "kubernetes.io/no-provisioner",
    }


def bound_claim(namespace: str, name: str) -> dict[str, Any]:
    """Return a claim on the volume of that name."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": "",
            "volumeName": f"{namespace}-{name}",
            "resources": {"requests": {"storage": _SIZE}},
        },
    }

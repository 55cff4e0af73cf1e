"""Volumes on directories of this machine, which every node sees, and claims on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_SIZE = "10Gi"

_EVERY_NODE = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]}]}]}


def volume(namespace: str, name: str, directory: Path, *, storage_class: str, size: str = _SIZE) -> dict[str, Any]:
    """A volume on a directory of this machine; without a class it is kept for the claim of its name.

    A local volume: the kubelet demands that the directory is there, and gives its files to the group of a pod that has one
    (`fsGroup`), which it does not do for hostPath volumes.
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
    """A storage class whose volumes are made beforehand."""
    annotations = {"storageclass.kubernetes.io/is-default-class": "true"} if is_default else {}
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": name, "annotations": annotations},
        "provisioner": "kubernetes.io/no-provisioner",
    }


def bound_claim(namespace: str, name: str) -> dict[str, Any]:
    """A claim on the volume of that name."""
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

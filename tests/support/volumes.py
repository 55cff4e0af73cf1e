"""Volumes on directories of this machine, which every node sees, and claims on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_SIZE = {"storage": "10Gi"}


def volume(namespace: str, name: str, directory: Path, *, storage_class: str, kind: str = "") -> dict[str, Any]:
    """A volume on a directory of this machine; without a class it is kept for the claim of its name.

    `kind`: what the kubelet demands to find there, such as Directory; it looks at nothing without.
    """
    reserved = {} if storage_class else {"claimRef": {"namespace": namespace, "name": name}}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"{namespace}-{name}"},
        "spec": {
            "capacity": _SIZE,
            "accessModes": ["ReadWriteMany"],
            "hostPath": {"path": str(directory), "type": kind},
            "storageClassName": storage_class,
            **reserved,
        },
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
            "resources": {"requests": _SIZE},
        },
    }

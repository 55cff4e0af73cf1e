"""The headless Service that gives every training pod a DNS name."""

from __future__ import annotations

from typing import Any

from finetune_job.names import OBSERVE_PORT, RENDEZVOUS_PORT, Role, service_name
from finetune_operator.children.ownership import Owner, labels, metadata


def gang_service(owner: Owner) -> dict[str, Any]:
    """One Service for all attempts.

    Addresses are published before the pods are ready: a rank becomes ready only after it has met the others.
    """
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": labels(owner, Role.TRAIN),
        "ports": [
            {"name": "rendezvous", "port": RENDEZVOUS_PORT, "targetPort": RENDEZVOUS_PORT, "protocol": "TCP"},
            {"name": "observe", "port": OBSERVE_PORT, "targetPort": OBSERVE_PORT, "protocol": "TCP"},
        ],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata(owner, service_name(owner.name)), "spec": spec}

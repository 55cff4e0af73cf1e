"""What the operator can be told, and its time-outs and limits, each with its reason."""

from __future__ import annotations

import argparse
import os
import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Everything that a running operator is told from outside."""

    namespaces: tuple[str, ...]
    """Namespaces that are watched; none: all."""
    lease_namespace: str
    """Namespace of the Lease that lets one replica work at a time."""
    lease_name: str
    claim_namespace: str
    """Namespace in which every release of the cluster says which namespaces it serves, so that no two serve the same."""
    identity: str
    """Holder written into the Lease. A process that finds its own identity there takes over at once, so no two processes
    that may live at the same time can share one; a pod's name has this property."""
    listen_address: str
    listen_port: int
    """Port of /metrics, /healthz and /readyz; 0: any free one."""
    log_level: str


@dataclass(frozen=True)
class Timeouts:
    """Periods and limits, in seconds unless their name says otherwise."""

    workers: int = 32
    """Jobs reconciled at the same time; each spends its time waiting for the API server."""
    requests_in_flight: int = 50
    """Requests under way at the same time at most; fewer while the API server says that it is busy."""
    pass_budget: float = 1.0
    """CPU seconds for reading and judging one job. A job that needs more is refused before its start."""
    request_timeout: float = 30.0
    relist: float = 600.0
    """How often objects whose deletion the watch missed are dropped from the cache."""
    first_relist: float = 30.0
    """The first time earlier: for what vanished between the start-up list and the first watch."""
    crd_wait: float = 3600.0
    """How long the CustomResourceDefinitions may be missing at start; after that the process exits to be seen."""
    crd_poll: float = 2.0
    lease_duration: float = 15.0
    lease_renew_deadline: float = 10.0
    """A holder that could not renew for this long sends nothing, before any other may believe the lease expired."""
    lease_retry: float = 2.0
    claim_duration: float = 60.0
    claim_renew_deadline: float = 40.0
    claim_retry: float = 10.0
    """Of the claim to namespaces: nobody waits for it but another release, so it is renewed less often."""
    progress_period: float = 5.0
    progress_period_longest: float = 60.0
    progress_writes_per_second: float = 20.0
    """Cap over all jobs: with more than `period x this` running jobs each is asked less often."""
    pending_events_after: float = 5.0
    """Pods pending for longer have their Events read, because a missing Secret or volume shows nowhere else."""
    drain: float = 20.0
    """Longest wait for passes in progress after SIGTERM; below the pod's termination grace period."""
    retry_first: float = 0.5
    retry_longest: float = 60.0
    """Bounds of the exponential delay before a key whose pass failed is tried again."""


def parse_settings(arguments: list[str] | None = None) -> Settings:
    """Settings from the command line. Exits with a usage message on unknown or malformed arguments."""
    parser = argparse.ArgumentParser(prog="python -m finetune_operator", description="Operator for FineTuneJobs.")
    parser.add_argument("--namespace", action="append", default=[], metavar="NAME", help="watch only this namespace (repeatable)")
    parser.add_argument("--lease-namespace", default=os.environ.get("POD_NAMESPACE", "default"), help="namespace of the Lease")
    parser.add_argument("--lease-name", default="finetune-operator", help="name of the Lease")
    parser.add_argument(
        "--claim-namespace",
        default="kube-system",
        help="namespace in which all releases of the cluster keep their claims to the namespaces that they serve",
    )
    parser.add_argument(
        "--identity",
        default=os.environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}",
        help="holder written into the Lease",
    )
    parser.add_argument("--listen-address", default="0.0.0.0", help="address of the metrics and probe server")  # noqa: S104
    parser.add_argument("--listen-port", type=int, default=8080, help="port of the metrics and probe server")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    given = parser.parse_args(arguments)
    return Settings(
        namespaces=tuple(sorted(set(given.namespace))),
        lease_namespace=given.lease_namespace,
        lease_name=given.lease_name,
        claim_namespace=given.claim_namespace,
        identity=given.identity,
        listen_address=given.listen_address,
        listen_port=given.listen_port,
        log_level=given.log_level,
    )

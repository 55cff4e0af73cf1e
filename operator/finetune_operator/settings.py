"""Settings of the operator, and its time-outs and limits, each with its reason."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

N = TypeVar("N", int, float)


MOST_WORKERS = 48
"""Largest number of workers. As many parsed jobs are cached, and more workers would parse them again and again."""


@dataclass(frozen=True)
class Rates:
    """How much is done at the same time."""

    workers: int = 32
    """Jobs reconciled at the same time; each spends its time waiting for the API server."""
    requests_in_flight: int = 50
    """Requests under way at the same time at most; fewer while the API server says that it is busy."""
    progress_seconds: float = 5.0
    """How often rank 0 of a job is asked for its progress."""
    progress_writes_per_second: float = 20.0
    """Cap over all jobs: with more than `progress_seconds x this` running jobs each is asked less often."""


@dataclass(frozen=True)
class Settings:
    """Everything that can be set for a running operator."""

    namespaces: tuple[str, ...]
    """Namespaces that are watched; all if empty."""
    lease_namespace: str
    """Namespace of the Lease that lets one replica work at a time."""
    lease_name: str
    identity: str
    """Holder written into the Lease. A process that finds its own identity there takes over at once, so no two processes
    that may live at the same time can share one; a pod's name has this property."""
    listen_address: str
    listen_port: int
    """Port of /metrics, /healthz and /readyz; 0 for any free one."""
    log_level: str
    rates: Rates = Rates()
    metrics_authentication: bool = False
    """Whether readers of the metrics need a token that the API server knows, and the right to read them."""
    tls_directory: Path | None = None
    """Directory with tls.crt and tls.key; None for plain HTTP."""


@dataclass(frozen=True)
class Timeouts:
    """Periods and limits, in seconds unless their name says otherwise."""

    pass_budget: float = 1.0
    """CPU seconds for reading and judging one job. A job that needs more is refused before its start."""
    request_timeout: float = 30.0
    relist: float = 600.0
    """How often objects whose deletion the watch missed are dropped from the cache."""
    first_relist: float = 30.0
    """The first time is earlier, for objects that vanished between the start-up list and the first watch."""
    crd_wait: float = 3600.0
    """How long the CustomResourceDefinitions may be missing at start; after that the process exits to be seen."""
    crd_poll: float = 2.0
    lease_duration: float = 15.0
    lease_renew_deadline: float = 10.0
    """A holder that could not renew for this long sends nothing, before any other may believe the lease expired."""
    lease_retry: float = 2.0
    progress_period_longest: float = 60.0
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
        "--identity",
        default=os.environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}",
        help="holder written into the Lease",
    )
    parser.add_argument("--listen-address", default="0.0.0.0", help="address of the metrics and probe server")  # noqa: S104
    parser.add_argument("--listen-port", type=int, default=8080, help="port of the metrics and probe server")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    usual = Rates()
    parser.add_argument(
        "--workers", type=_between(int, 1, MOST_WORKERS), default=usual.workers, help="jobs looked at at the same time"
    )
    parser.add_argument(
        "--requests-in-flight",
        type=_between(int, 1, 1000),
        default=usual.requests_in_flight,
        help="requests to the API server under way at the same time at most",
    )
    parser.add_argument(
        "--progress-seconds",
        type=_between(float, 1, 3600),
        default=usual.progress_seconds,
        help="how often a running job is asked for its progress",
    )
    parser.add_argument(
        "--progress-writes-per-second",
        type=_between(float, 1, 1000),
        default=usual.progress_writes_per_second,
        help="status writes for progress at most, over all jobs",
    )
    parser.add_argument(
        "--metrics-authentication", action="store_true", help="answer /metrics only to tokens that may `get` it; needs --tls"
    )
    parser.add_argument("--tls", type=Path, metavar="DIRECTORY", help="serve TLS with DIRECTORY/tls.crt and DIRECTORY/tls.key")
    given = parser.parse_args(arguments)
    if given.metrics_authentication and given.tls is None:
        parser.error("--metrics-authentication needs --tls: tokens do not travel in clear text")
    return Settings(
        namespaces=tuple(sorted(set(given.namespace))),
        lease_namespace=given.lease_namespace,
        lease_name=given.lease_name,
        identity=given.identity,
        listen_address=given.listen_address,
        listen_port=given.listen_port,
        log_level=given.log_level,
        rates=Rates(given.workers, given.requests_in_flight, given.progress_seconds, given.progress_writes_per_second),
        metrics_authentication=given.metrics_authentication,
        tls_directory=given.tls,
    )


def _between(kind: Callable[[str], N], least: N, most: N) -> Callable[[str], N]:
    def parse(text: str) -> N:
        number = kind(text)
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text} is not between {least} and {most}")
        return number

    return parse

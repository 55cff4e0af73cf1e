"""The operator's settings, timeouts and limits, with the reason for each."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MOST_WORKERS = 48
"""Maximum number of workers. They share one event loop, so more workers would not be faster."""


@dataclass(frozen=True)
class Rates:
    """Limits on concurrent work and on request rates."""

    workers: int = 32
    """Number of jobs that are reconciled at the same time; most of that time is spent waiting for the API server."""
    requests_in_flight: int = 50
    """Maximum number of requests that wait for an answer at the same time."""
    progress_seconds: float = 5.0
    """Seconds between two requests to rank 0 for the progress of a job."""
    progress_writes_per_second: float = 20.0
    """Limit over all jobs: if more than `progress_seconds` times this number of jobs are running, each is asked less often."""


@dataclass(frozen=True)
class Settings:
    """All settings of the operator process."""

    namespaces: tuple[str, ...]
    """Namespaces to watch; empty for all namespaces."""
    lease_namespace: str
    """Namespace of the Lease that ensures that only one replica works at a time."""
    lease_name: str
    identity: str
    """Holder to write into the Lease. A process that finds its own identity there takes the Lease at once, so processes that may
    run at the same time need different identities, such as their pod names."""
    listen_address: str
    listen_port: int
    """Port of /metrics, /healthz and /readyz; 0 for any free port."""
    log_level: str
    rates: Rates = Rates()
    metrics_authentication: bool = False
    """Whether readers of the metrics need a token that the API server knows, and permission to read them."""
    tls_directory: Path | None = None
    """Directory with tls.crt and tls.key; None for plain HTTP."""


@dataclass(frozen=True)
class Timeouts:
    """Periods and limits, in seconds unless their name says otherwise."""

    request_timeout: float = 30.0
    relist: float = 600.0
    """Seconds between two comparisons of the cache with the API server, which repair what the watches missed."""
    first_relist: float = 30.0
    """Seconds until the first comparison, which finds objects that vanished between the start-up list and the first watch."""
    crd_wait: float = 3600.0
    """How long the CRDs may be missing at the start. After that the process exits, so that the problem is noticed."""
    crd_poll: float = 2.0
    lease_duration: float = 15.0
    lease_renew_deadline: float = 10.0
    """A holder that has failed to renew for this long stops sending requests, before another replica may take the lease."""
    lease_retry: float = 2.0
    progress_period_longest: float = 60.0
    pending_events_after: float = 5.0
    """Events of pods that are pending for longer than this are reported: a missing Secret or volume shows only there."""
    drain: float = 20.0
    """Longest wait for running passes after SIGTERM; shorter than the pod's termination grace period."""
    retry_first: float = 0.5
    retry_longest: float = 60.0
    """Bounds of the exponential backoff after a failed pass over a job."""


def parse_settings(arguments: list[str] | None = None) -> Settings:
    """Read the settings from the command line. Exits with a usage message on unknown or malformed arguments."""
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
    for flag, kind, least, most, text in (
        ("--workers", int, 1, MOST_WORKERS, "number of jobs that are reconciled at the same time"),
        ("--requests-in-flight", int, 1, 1000, "maximum number of requests to the API server at the same time"),
        ("--progress-seconds", float, 1, 3600, "seconds between two requests for the progress of a running job"),
        ("--progress-writes-per-second", float, 1, 1000, "maximum rate of status writes for progress, over all jobs"),
    ):
        usual = getattr(Rates(), flag.strip("-").replace("-", "_"))
        parser.add_argument(flag, type=_between(kind, least, most), default=usual, help=text)
    parser.add_argument(
        "--metrics-authentication", action="store_true", help="answer /metrics only to tokens that may `get` it; needs --tls"
    )
    parser.add_argument("--tls", type=Path, metavar="DIRECTORY", help="serve TLS with DIRECTORY/tls.crt and DIRECTORY/tls.key")
    given = parser.parse_args(arguments)
    if given.metrics_authentication and given.tls is None:
        parser.error("--metrics-authentication needs --tls: tokens must not be sent in clear text")
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


def _between(kind: type[float], least: float, most: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        number = kind(text)
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text} is not between {least} and {most}")
        return number

    return parse

"""The `publish` role: bring the results to the plan's destination. It may be killed and run again at any point."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from finetune_job.api.base import BucketPath, ClaimPath, HubPath, RegistryPath, parse_destination
from finetune_job.failures import Outcome, TerminationReport
from finetune_job.names import Role
from finetune_job.plan.launch_plan import PublishPlan
from finetune_trainer.context import RunContext
from finetune_trainer.credentials import Credentials
from finetune_trainer.errors import InvariantError, PreemptedError
from finetune_trainer.network.environment import s3_service
from finetune_trainer.network.retry import RetryPolicy, StoppedError
from finetune_trainer.publish.destination import Destination, Publication
from finetune_trainer.publish.oci import RegistryDestination
from finetune_trainer.publish.resumable import UploadJournal
from finetune_trainer.publish.s3 import BucketDestination
from finetune_trainer.release.checksums import read_release
from finetune_trainer.release.files import Release
from finetune_trainer.release.repositories import release_by_repository
from finetune_trainer.release.sign import signed

log = logging.getLogger(__name__)
Location = ClaimPath | HubPath | BucketPath | RegistryPath


def publish(context: RunContext, credentials: Credentials, patience: RetryPolicy | None = None) -> TerminationReport:
    """Publish the release.

    Raises DestinationRefusedError, DestinationUnavailableError, CheckpointError if the results have changed since the merge,
    PreemptedError, OSError.
    """
    plan = context.plan.publish
    if plan is None:
        raise InvariantError("the plan publishes nothing", "the results are on the claim of spec.output.destination already")
    started, stop = time.monotonic(), threading.Event()
    with TemporaryDirectory(prefix="signature-") as scratch, _sigterm(stop) as came:
        publications: list[Publication] = []
        total = 0
        for location, release in _signed_releases(plan, read_release(context), credentials, Path(scratch)):
            size = sum(file.size for file in (*release.files, release.manifest))
            log.info("%s: %d files, %d bytes", plan.destination, len(release.files) + 1, size)
            destination = _open(plan, location, context, credentials, patience=patience or RetryPolicy(), stop=stop)
            try:
                publications.append(destination.publish(release))
            except StoppedError:
                if not came.is_set():
                    raise
                raise PreemptedError("SIGTERM arrived; what is at the destination is not sent again") from None
            total += size
    *before, last = publications
    facts = {
        "address": last.address,
        "digest": last.digest,
        "bytes": str(total),
        "bytes_sent": str(sum(publication.bytes_sent for publication in publications)),
        "seconds": f"{time.monotonic() - started:.1f}",
    }
    if before:
        facts["adapter_address"] = before[0].address
    return TerminationReport(role=Role.PUBLISH, attempt=context.attempt, outcome=Outcome.SUCCEEDED, time=time.time(), facts=facts)


def _signed_releases(
    plan: PublishPlan, release: Release, credentials: Credentials, scratch: Path
) -> list[tuple[Location, Release]]:
    """Return each location with its release, in the order of publishing. If there is a key, each release is signed."""
    location = parse_destination(plan.destination)
    releases: list[tuple[Location, Release]] = [(location, release)]
    if isinstance(location, HubPath):
        releases = [*release_by_repository(release, location, scratch)]
    key = credentials.signing_key()
    if key is None:
        return releases
    directories = [scratch / f"signature-{number}" for number in range(len(releases))]
    for directory in directories:
        directory.mkdir()
    return [(place, signed(part, key, directory)) for (place, part), directory in zip(releases, directories, strict=True)]


def _open(
    plan: PublishPlan,
    location: Location,
    context: RunContext,
    credentials: Credentials,
    *,
    patience: RetryPolicy,
    stop: threading.Event,
) -> Destination:
    match location:
        case RegistryPath():
            return RegistryDestination(
                location,
                credentials.registry_login(location.registry),
                UploadJournal(context.workspace.publication),
                stop,
                plain_http=location.registry in plan.plain_http_registries,
                patience=patience,
            )
        case BucketPath():
            service = s3_service(plan.s3_endpoint, plan.s3_region)
            journal = UploadJournal(context.workspace.publication)
            return BucketDestination(location, service, credentials.s3_session(), journal, stop, patience=patience)
        case HubPath():
            from finetune_trainer.publish.hub import HubDestination

            return HubDestination(
                location,
                token=credentials.hub_token(),
                endpoint=plan.hub_endpoint,
                private=plan.private,
                patience=patience,
                stop=stop,
            )
        case ClaimPath():
            raise InvariantError(f"{plan.destination} is on a claim already", "leave it out of plan.publish")


@contextmanager
def _sigterm(stop: threading.Event) -> Iterator[threading.Event]:
    """Set `stop` and the yielded event on SIGTERM, which a container's first process would otherwise ignore."""
    came = threading.Event()

    def end(_number: int, _frame: object) -> None:
        came.set()
        stop.set()

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, before)

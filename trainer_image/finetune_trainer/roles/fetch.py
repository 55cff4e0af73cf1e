"""The `fetch` role: list every source, see that there is room, copy, prove, publish. May be killed and run again at any point."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from finetune_job.api.base import BucketPath, HubPath, parse_source
from finetune_job.failures import Outcome, TerminationReport
from finetune_job.names import Role
from finetune_job.plan.sources import input_locations
from finetune_job.plan.transfers import FetchItem, FetchPlan
from finetune_trainer.context import RunContext
from finetune_trainer.credentials import Credentials
from finetune_trainer.data.read import KNOWN_EXTENSIONS
from finetune_trainer.errors import DataError, InvariantError, ModelError, TrainerError
from finetune_trainer.fetch.bucket import BucketPrefix, open_bucket
from finetune_trainer.fetch.errors import NoRoomError, source_given_up
from finetune_trainer.fetch.hub import HubRepository
from finetune_trainer.fetch.manifest import FetchedFile, FetchManifest, manifest_path, proven, write_manifest
from finetune_trainer.fetch.remote import Remote, RemoteFile, listing_problem
from finetune_trainer.fetch.selection import data_files, has_weights, model_files
from finetune_trainer.fetch.staging import Staging
from finetune_trainer.fetch.transfer import Conduct, take
from finetune_trainer.files import file_sha256
from finetune_trainer.network.errors import StoppedError
from finetune_trainer.network.retry import Patience, retried
from finetune_trainer.network.s3_service import s3_service

log = logging.getLogger(__name__)
FILES_AT_ONCE = 8
TELL_SECONDS = 10.0
"""Between two lines of progress."""
_MB = 1e6


@dataclass(frozen=True)
class Wanted:
    """One source of the plan."""

    item: FetchItem
    field: str
    """Where the manifest names it."""
    is_model: bool
    target: Path

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def refusal(self) -> type[TrainerError]:
        """What is raised where the user named something that is not there."""
        return ModelError if self.is_model else DataError


@dataclass(frozen=True)
class Listed:
    """A source whose files are known."""

    wanted: Wanted
    remote: Remote
    files: tuple[RemoteFile, ...]
    staging: Staging


def fetch(
    context: RunContext,
    credentials: Credentials,
    patience: Patience | None = None,
    free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
) -> TerminationReport:
    """Bring everything that the plan names. Raises SourceUnavailableError, NoRoomError, ModelError, DataError, OSError."""
    plan = context.plan.fetch
    if plan is None:
        raise InvariantError("the plan names nothing to fetch", "start preflight instead")
    started = time.monotonic()
    patience = patience or Patience()
    manifests: dict[str, FetchManifest] = {}
    missing: list[Wanted] = []
    for wanted in wanted_sources(context, plan):
        whole = proven(wanted.target, wanted.item)
        if whole is None:
            missing.append(wanted)
        else:
            log.info("%s: %s is there already, byte for byte", wanted.name, wanted.item.source)
            Staging(wanted.target).discard()
            manifests[wanted.name] = whole
    listed = [_list(wanted, _open(wanted, plan, credentials), context.plan.model.allow_remote_code, patience) for wanted in missing]
    _check_room(context.workspace.sources, listed, free_bytes)
    received = 0
    for source in listed:
        counter = _Counter(source)
        manifests[source.wanted.name] = _bring(source, patience, counter)
        received += counter.received
    seconds = time.monotonic() - started
    facts = {
        "files": str(sum(len(manifest.files) for manifest in manifests.values())),
        "bytes": str(sum(manifest.total_bytes for manifest in manifests.values())),
        "transferred_bytes": str(received),
        "seconds": f"{seconds:.1f}",
    }
    for wanted in wanted_sources(context, plan):
        if wanted.item.revision is not None:
            facts[f"{wanted.name}_revision"] = wanted.item.revision
        facts[f"{wanted.name}_sha256"] = file_sha256(manifest_path(wanted.target))
    return TerminationReport(role=Role.FETCH, attempt=context.attempt, outcome=Outcome.SUCCEEDED, time=time.time(), facts=facts)


def wanted_sources(context: RunContext, plan: FetchPlan) -> list[Wanted]:
    """The plan's items with the fields that name them; the model first."""
    fields = {location: field for field, location in reversed(input_locations(context.plan))}
    found = [
        Wanted(item, fields[item.target], item.target == context.plan.model.location, context.path(item.target))
        for item in plan.items
    ]
    return sorted(found, key=lambda wanted: not wanted.is_model)


def _open(wanted: Wanted, plan: FetchPlan, credentials: Credentials) -> Remote:
    place = parse_source(wanted.item.source)
    if isinstance(place, HubPath):
        if wanted.item.revision is None:
            raise InvariantError(f"{wanted.item.source} has no revision", "write the commit beside the source")
        return HubRepository(
            place,
            wanted.item.revision,
            token=credentials.hub_token(),
            endpoint=plan.hub_endpoint,
            field=wanted.field,
            refusal=wanted.refusal,
        )
    if isinstance(place, BucketPath):
        keys = credentials.s3_keys()
        store = open_bucket(place.bucket, s3_service(plan.s3_endpoint, plan.s3_region), keys)
        return BucketPrefix(store, place, wanted.field, wanted.refusal, signed=keys is not None)
    raise InvariantError(f"{wanted.item.source} lies on a claim", "it needs no fetching")


def _list(wanted: Wanted, remote: Remote, allow_remote_code: bool, patience: Patience) -> Listed:
    found = retried(wanted.item.source, patience, threading.Event(), source_given_up, remote.files)
    problem = listing_problem(found)
    if problem is not None:
        raise wanted.refusal(f"{wanted.field}: {wanted.item.source} cannot be copied: {problem}", "rename it at the source")
    files = model_files(found, allow_remote_code=allow_remote_code) if wanted.is_model else data_files(found)
    if wanted.is_model and not has_weights(files):
        raise ModelError(
            f"{wanted.field}: {wanted.item.source} holds no safetensors file; it holds {_shown(found)}",
            "give a model that is saved as safetensors; other formats of weights can run code when they are loaded",
        )
    if not files:
        raise DataError(
            f"{wanted.field}: {wanted.item.source} holds no file of records; it holds {_shown(found)}",
            f"give files whose names end in {', '.join(KNOWN_EXTENSIONS)}",
        )
    staging = Staging(wanted.target)
    staging.open(files)
    log.info("%s: %s, %d files, %.1f MB", wanted.name, wanted.item.source, len(files), sum(file.size for file in files) / _MB)
    return Listed(wanted, remote, tuple(files), staging)


def _shown(files: list[RemoteFile]) -> str:
    names = sorted(file.path for file in files)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _check_room(directory: Path, listed: list[Listed], free_bytes: Callable[[Path], int]) -> None:
    if not listed:
        return
    needed = sum(sum(file.size for file in source.files) - source.staging.held_bytes() for source in listed)
    free = free_bytes(directory)
    if needed > free:
        raise NoRoomError(
            f"the sources need {needed} bytes more on the workspace, and {free} bytes are free",
            f"enlarge the claim of spec.workspace by at least {needed - free} bytes; checkpoints and prepared data come on top",
        )


class _Counter:
    """Bytes that came over the network for one source."""

    def __init__(self, source: Listed) -> None:
        self._name, self._total = source.wanted.name, sum(file.size for file in source.files)
        self._before = source.staging.held_bytes()
        self._lock, self.received, self._started = threading.Lock(), 0, time.monotonic()

    def count(self, number: int) -> None:
        with self._lock:
            self.received += number

    def tell(self) -> None:
        rate = self.received / _MB / max(time.monotonic() - self._started, 1e-3)
        done = min(self._before + self.received, self._total)
        log.info("%s: %.0f of %.0f MB, %.0f MB/s", self._name, done / _MB, self._total / _MB, rate)


def _bring(source: Listed, patience: Patience, counter: _Counter) -> FetchManifest:
    wanted, stop = source.wanted, threading.Event()
    conduct = Conduct(patience, stop, counter.count)
    with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix=wanted.name) as executor:
        # The largest first, so that none of them is alone at the end.
        running = [
            executor.submit(take, source.remote, file, source.staging, conduct)
            for file in sorted(source.files, key=lambda file: -file.size)
        ]
        try:
            kept = _await(running, counter)
        finally:
            stop.set()
            executor.shutdown(cancel_futures=True)
    manifest = FetchManifest(
        source=wanted.item.source, revision=wanted.item.revision, files=tuple(sorted(kept, key=lambda file: file.path))
    )
    if wanted.target.exists():
        log.warning("%s: what was there is not what was fetched, and is replaced", wanted.name)
        shutil.rmtree(wanted.target)
    write_manifest(wanted.target, manifest)
    source.staging.publish(wanted.target)
    counter.tell()
    return manifest


def _await(running: list[Future[FetchedFile]], counter: _Counter) -> list[FetchedFile]:
    """The files, once all are there. Raises the first failure."""
    while True:
        done, pending = wait(running, timeout=TELL_SECONDS, return_when=FIRST_EXCEPTION)
        failures = [error for future in done if (error := future.exception()) is not None]
        causes = [error for error in failures if not isinstance(error, StoppedError)]
        if failures:
            raise causes[0] if causes else failures[0]
        if not pending:
            return [future.result() for future in running]
        counter.tell()

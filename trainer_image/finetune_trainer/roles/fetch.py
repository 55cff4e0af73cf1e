"""The `fetch` role: list every source, check that there is room, copy, verify, publish. It may be killed and run again at any
point.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from finetune_job.api.base import BucketPath, HubPath, parse_source
from finetune_job.api.inputs import DataFormat
from finetune_job.chat_templates import fitting_template
from finetune_job.failures import Outcome, TerminationReport
from finetune_job.names import Role
from finetune_job.plan.inputs import input_locations
from finetune_job.plan.launch_plan import FetchItem, FetchPlan
from finetune_trainer.context import RunContext
from finetune_trainer.credentials import Credentials
from finetune_trainer.data.read import KNOWN_EXTENSIONS
from finetune_trainer.errors import DataError, InvariantError, ModelError, TrainerError
from finetune_trainer.fetch.bucket import RANGES_AT_ONCE, BucketPrefix
from finetune_trainer.fetch.hub import HubRepository
from finetune_trainer.fetch.source import (
    NoRoomError,
    RemoteFile,
    RemoteSource,
    data_files,
    has_weights,
    listing_problem,
    model_files,
    source_unavailable,
)
from finetune_trainer.fetch.staging import FetchedFile, FetchManifest, FetchStaging, manifest_path, verified_fetch, write_manifest
from finetune_trainer.fetch.transfer import TransferOptions, fetch_file
from finetune_trainer.files import TEMPLATES, file_sha256, remove_tree
from finetune_trainer.network.environment import s3_service
from finetune_trainer.network.object_store import open_store
from finetune_trainer.network.retry import RetryPolicy, StoppedError, with_retries

log = logging.getLogger(__name__)

FILES_AT_ONCE = 8
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE_FILES = ("chat_template.", TEMPLATES)
"""Prefixes of the paths of files that hold only a chat template."""
PROGRESS_SECONDS = 10.0
"""Time between two progress messages in the log."""
_MB = 1e6


@dataclass(frozen=True)
class WantedSource:
    """One source of the plan."""

    item: FetchItem
    field: str
    """Manifest path of the field that names the source."""
    is_model: bool
    target: Path

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def refusal(self) -> type[TrainerError]:
        """Error to raise if this source does not exist, or holds no usable files."""
        return ModelError if self.is_model else DataError


@dataclass(frozen=True)
class ListedSource:
    """A source with the list of its files."""

    wanted: WantedSource
    remote: RemoteSource
    files: tuple[RemoteFile, ...]
    staging: FetchStaging


def fetch(
    context: RunContext,
    credentials: Credentials,
    retry_policy: RetryPolicy | None = None,
    free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
) -> TerminationReport:
    """Fetch everything that the plan names. Raises SourceUnavailableError, NoRoomError, ModelError, DataError, OSError."""
    plan = context.plan.fetch
    if plan is None:
        raise InvariantError("the plan names nothing to fetch", "start preflight instead")
    started = time.monotonic()
    retry_policy = retry_policy or RetryPolicy()
    manifests: dict[str, FetchManifest] = {}
    missing: list[WantedSource] = []
    for wanted in wanted_sources(context, plan):
        whole = verified_fetch(wanted.target, wanted.item)
        if whole is None:
            missing.append(wanted)
        else:
            log.info("%s: %s is there already, byte for byte", wanted.name, wanted.item.source)
            FetchStaging(wanted.target).discard()
            manifests[wanted.name] = whole
    listed = [
        _list(wanted, _open(wanted, plan, credentials), context.plan.model.allow_remote_code, retry_policy) for wanted in missing
    ]
    _check_room(context.workspace.sources, listed, free_bytes)
    if context.plan.data.format is DataFormat.CHAT and context.plan.data.chat_template is None:
        for source in listed:
            if source.wanted.is_model:
                _check_has_template(source, retry_policy)
    received = 0
    for source in listed:
        counter = _Counter(source)
        manifests[source.wanted.name] = _bring(source, retry_policy, counter)
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


def wanted_sources(context: RunContext, plan: FetchPlan) -> list[WantedSource]:
    """Return the plan's sources, each with the manifest field that names it; the model comes first."""
    fields = {location: field for field, location in reversed(input_locations(context.plan))}
    sources = [
        WantedSource(item, fields[item.target], item.target == context.plan.model.location, context.path(item.target))
        for item in plan.items
    ]
    return sorted(sources, key=lambda wanted: not wanted.is_model)


def _open(wanted: WantedSource, plan: FetchPlan, credentials: Credentials) -> RemoteSource:
    location = parse_source(wanted.item.source)
    if isinstance(location, HubPath):
        if wanted.item.revision is None:
            raise InvariantError(f"{wanted.item.source} has no revision", "give the source a revision in the plan")
        return HubRepository(
            location,
            wanted.item.revision,
            token=credentials.hub_token(),
            endpoint=plan.hub_endpoint,
            field=wanted.field,
            refusal=wanted.refusal,
        )
    if isinstance(location, BucketPath):
        session = credentials.s3_session()
        store = open_store(s3_service(plan.s3_endpoint, plan.s3_region), session, connections=FILES_AT_ONCE * RANGES_AT_ONCE)
        return BucketPrefix(store, location, wanted.field, wanted.refusal, signed=session is not None)
    raise InvariantError(f"{wanted.item.source} is on a claim already", "leave it out of plan.fetch")


def _list(wanted: WantedSource, remote: RemoteSource, allow_remote_code: bool, retry_policy: RetryPolicy) -> ListedSource:
    log.info("%s: asking %s which files there are", wanted.name, wanted.item.source)
    remote_files = with_retries(wanted.item.source, retry_policy, threading.Event(), source_unavailable, remote.files)
    problem = listing_problem(remote_files)
    if problem is not None:
        raise wanted.refusal(f"{wanted.field}: {wanted.item.source} cannot be copied: {problem}", "rename it at the source")
    files = model_files(remote_files, allow_remote_code=allow_remote_code) if wanted.is_model else data_files(remote_files)
    if wanted.is_model and not has_weights(files):
        raise ModelError(
            f"{wanted.field}: {wanted.item.source} holds no safetensors file; it holds {_shown(remote_files)}",
            "give a model that is saved as safetensors; other formats of weights can run code when they are loaded",
        )
    if not files:
        raise DataError(
            f"{wanted.field}: {wanted.item.source} holds no file of records; it holds {_shown(remote_files)}",
            f"give files whose names end in {', '.join(KNOWN_EXTENSIONS)}",
        )
    staging = FetchStaging(wanted.target)
    staging.open(files)
    log.info("%s: %s, %d files, %.1f MB", wanted.name, wanted.item.source, len(files), sum(file.size for file in files) / _MB)
    return ListedSource(wanted, remote, tuple(files), staging)


def _check_has_template(source: ListedSource, retry_policy: RetryPolicy) -> None:
    """Check that the model has a chat template before gigabytes of weights are copied; base models usually have none.

    The file that is fetched for this check is kept, so it is not fetched again.
    """
    files = {file.path: file for file in source.files}
    config = files.get(TOKENIZER_CONFIG)
    if config is None or any(path.startswith(TEMPLATE_FILES) for path in files):
        return
    fetch_file(source.remote, config, source.staging, TransferOptions(retry_policy, threading.Event(), lambda _: None))
    try:
        content = json.loads((source.staging.files / TOKENIZER_CONFIG).read_bytes())
    except (ValueError, RecursionError):  # preflight reports what is wrong with the file
        return
    if isinstance(content, dict) and not content.get("chat_template"):
        added = content.get("added_tokens_decoder")
        tokens = added.values() if isinstance(added, dict) else ()
        known = frozenset(str(token.get("content")) for token in tokens if isinstance(token, dict))
        raise ModelError(
            f"{source.wanted.field}: {source.wanted.item.source} has no chat template, as is usual for a base model, and "
            "spec.data.format is Chat",
            f"name a model made for chats, or set spec.data.chatTemplate: {fitting_template(known)}",
        )


def _shown(files: list[RemoteFile]) -> str:
    names = sorted(file.path for file in files)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _check_room(directory: Path, listed: list[ListedSource], free_bytes: Callable[[Path], int]) -> None:
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
    """Counts the bytes that came over the network for one source."""

    def __init__(self, source: ListedSource) -> None:
        self._name, self._total = source.wanted.name, sum(file.size for file in source.files)
        self._before = source.staging.held_bytes()
        self._lock, self.received, self._started = threading.Lock(), 0, time.monotonic()

    def count(self, number: int) -> None:
        with self._lock:
            self.received += number

    def log_progress(self) -> None:
        rate = self.received / _MB / max(time.monotonic() - self._started, 1e-3)
        done = min(self._before + self.received, self._total)
        log.info("%s: %.0f of %.0f MB, %.0f MB/s", self._name, done / _MB, self._total / _MB, rate)


def _bring(source: ListedSource, retry_policy: RetryPolicy, counter: _Counter) -> FetchManifest:
    wanted, stop = source.wanted, threading.Event()
    options = TransferOptions(retry_policy, stop, counter.count)
    with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix=wanted.name) as executor:
        # The largest files come first, so that no large file is copied alone at the end.
        running = [
            executor.submit(fetch_file, source.remote, file, source.staging, options)
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
    if os.path.lexists(wanted.target):
        log.warning("%s: the earlier files differ from the fetched ones and are replaced", wanted.name)
        remove_tree(wanted.target)
    write_manifest(wanted.target, manifest)
    source.staging.publish(wanted.target)
    counter.log_progress()
    return manifest


def _await(running: list[Future[FetchedFile]], counter: _Counter) -> list[FetchedFile]:
    """Wait for all files. Raises the first failure."""
    while True:
        done, pending = wait(running, timeout=PROGRESS_SECONDS, return_when=FIRST_EXCEPTION)
        failures = [error for future in done if (error := future.exception()) is not None]
        causes = [error for error in failures if not isinstance(error, StoppedError)]
        if failures:
            raise causes[0] if causes else failures[0]
        if not pending:
            return [future.result() for future in running]
        counter.log_progress()

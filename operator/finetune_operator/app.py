"""Starts the parts of the operator in order (health server, CRDs, lease, first list, watches, workers) and shuts them down."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from kubernetes.aio.client.configuration import Configuration

from finetune_operator.cache.cache import Cache
from finetune_operator.cache.kopf_watch import Watches
from finetune_operator.cache.projection import utc_now
from finetune_operator.cache.relist import relist
from finetune_operator.cache.warning_events import WarningEvents
from finetune_operator.client.access import load_configuration
from finetune_operator.client.api import Api
from finetune_operator.client.discovery import wait_for_crds
from finetune_operator.client.kinds import EVENTS, PROFILES, JobKey, Kind
from finetune_operator.client.raw_objects import UnreadableObjects
from finetune_operator.leader.leadership import LeadershipThread
from finetune_operator.leader.lease import Elector, LeaseObject, LeaseTiming
from finetune_operator.logs import logger
from finetune_operator.metrics.health import BEAT_SECONDS, Health, health_server
from finetune_operator.metrics.job_counters import JobCounters
from finetune_operator.metrics.metrics import Metrics
from finetune_operator.metrics.metrics_gate import Certificate, MetricsGate
from finetune_operator.passes.execute import Executor
from finetune_operator.passes.gather import Gatherer
from finetune_operator.passes.recorder import EventRecorder
from finetune_operator.passes.worker import Worker, urgency
from finetune_operator.queue.workqueue import WorkQueue
from finetune_operator.settings import Settings, Timeouts
from finetune_operator.side_tasks.background import Relisting, keep_trying
from finetune_operator.side_tasks.profile_status import ProfileStatus
from finetune_operator.side_tasks.progress_poll import ProgressPoll

_log = logger(__name__)
LAG_PERIOD_SECONDS = 0.25
FLUSH_SECONDS = 2.0
"""Maximum time for writing the remaining events at shutdown."""


async def run(settings: Settings, timeouts: Timeouts) -> int:
    """Run until SIGTERM or SIGINT (exit code 0), or until an error that cannot be handled here (exit code 1)."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    health, metrics = Health(), Metrics()
    server = health_server(
        settings.listen_address,
        settings.listen_port,
        health,
        metrics.registry,
        gate=MetricsGate() if settings.metrics_authentication else None,
        tls=None if settings.tls_directory is None else Certificate(settings.tls_directory),
    )
    server.start()
    _log.info("listening", address=server.address[0], port=server.address[1], identity=settings.identity)
    beat = asyncio.create_task(_beat(health))
    configuration = await load_configuration()
    leadership = LeadershipThread(lambda: _elector(configuration, settings, timeouts))
    api = Api(
        configuration,
        most_in_flight=settings.rates.requests_in_flight,
        request_timeout=timeouts.request_timeout,
        observer=metrics.request,
        fence=leadership.fence,
    )
    try:
        if not await _run_unless_stopped(stopping, _wait_for_crds(configuration, timeouts, metrics)):
            return 0
        # A standby counts as ready: it has no work until it leads, and a rolling update would wait for it forever.
        health.is_ready = True
        leadership.start()
        if not await _run_unless_stopped(stopping, leadership.held.wait()):
            return 0
        _log.info("leading", identity=settings.identity)
        return await _lead(settings, timeouts, api, health=health, metrics=metrics, stopping=stopping)
    finally:
        # Close first and release the lease last, so that none of our writes reaches the server after the next leader takes over.
        await api.close()
        await leadership.stop()
        beat.cancel()
        server.stop()


async def _wait_for_crds(configuration: Configuration, timeouts: Timeouts, metrics: Metrics) -> None:
    api = Api(configuration, request_timeout=timeouts.request_timeout, observer=metrics.request)
    try:
        await wait_for_crds(api, timeouts.crd_wait, timeouts.crd_poll)
    finally:
        await api.close()


async def _lead(
    settings: Settings, timeouts: Timeouts, api: Api, *, health: Health, metrics: Metrics, stopping: asyncio.Event
) -> int:
    cache = Cache(unreadable=UnreadableObjects(metrics.unreadable))
    queue: WorkQueue[JobKey] = WorkQueue(
        retry_first=timeouts.retry_first, retry_longest=timeouts.retry_longest, waited=metrics.waited
    )
    cache.lines.turn_has_come = lambda key: queue.add(key, urgency(cache.job(key)))
    warnings = WarningEvents(cache)
    gatherer = Gatherer(api, cache, timeouts.pending_events_after, warnings, operator_namespace=settings.lease_namespace)
    recorder = EventRecorder(api, settings.identity, dropped=metrics.event_dropped)
    executor = Executor(api, cache, gatherer, recorder, status_written=JobCounters(cache, metrics.registry).count)
    profiles = ProfileStatus(api, cache)

    def take_in(kind: Kind, deleted: bool, document: Any) -> None:
        if kind == EVENTS:
            key = None if deleted else warnings.take(document)
            if key is not None:
                queue.add(key)
            return
        for key in sorted(cache.take_deleted(kind, document) if deleted else cache.take(kind, document)):
            queue.add(key, urgency(cache.job(key)))
        if kind == PROFILES:
            profiles.changed.set()

    health.is_ready = False
    health.is_leading = True
    watches = Watches(settings.namespaces, take_in)
    metrics.observe_state(cache, queue, health, watches)
    first_list = keep_trying("first list", lambda: relist(api, cache, settings.namespaces), metrics.failed)
    if not await _run_unless_stopped(stopping, first_list):
        return 0
    freeze_objects()
    watches.start()
    for key in cache.job_keys():
        queue.add(key, urgency(cache.job(key)))
    worker = Worker(queue, gatherer, executor, metrics, utc_now)
    poll = ProgressPoll(
        cache,
        gatherer,
        queue.add,
        period=settings.rates.progress_seconds,
        longest=max(settings.rates.progress_seconds, timeouts.progress_period_longest),
        writes_per_second=settings.rates.progress_writes_per_second,
    )
    workers = [asyncio.create_task(worker.run()) for _ in range(settings.rates.workers)]
    relisting = Relisting(
        compare=lambda: relist(api, cache, settings.namespaces),
        job_keys=cache.job_keys,
        queue=queue,
        first=timeouts.first_relist,
        period=timeouts.relist,
        restarted=watches.restarted,
        failed=metrics.failed,
    )
    tasks_by_name: dict[str, Callable[[], Awaitable[object]]] = {
        "progress poll": poll.run,
        "profiles": profiles.run,
        "relist": relisting.run,
        "loop lag": lambda: _measure_loop_lag(metrics.lagged),
        "events": recorder.run,
    }
    others = [asyncio.create_task(keep_trying(name, work, metrics.failed)) for name, work in tasks_by_name.items()]
    health.is_ready = True
    _log.info("ready", jobs=len(cache.jobs()))
    await _wait_for_first(stopping.wait(), watches.ended.wait(), *workers, *others)
    orderly = stopping.is_set()
    _log.info("stopping", orderly=orderly)
    health.is_ready = False
    queue.close()
    await watches.stop()
    for task in others:
        task.cancel()
    _, unfinished = await asyncio.wait(workers, timeout=timeouts.drain)
    for task in unfinished:
        task.cancel()
    await recorder.flush(FLUSH_SECONDS)
    failures = [item for item in await asyncio.gather(*workers, *others, return_exceptions=True) if isinstance(item, Exception)]
    for failure in failures:
        _log.error("task failed", error=repr(failure))
    return 0 if orderly and not failures else 1


def freeze_objects() -> None:
    """Collect garbage once, and exclude the surviving objects (code and first list) from later collections."""
    gc.collect()
    gc.freeze()


async def _measure_loop_lag(lagged: Callable[[float], None]) -> None:
    """Until cancelled, sleep repeatedly and report how many seconds too late each sleep ends."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_PERIOD_SECONDS
        await asyncio.sleep(LAG_PERIOD_SECONDS)
        lagged(max(loop.time() - due, 0.0))


async def _beat(health: Health) -> None:
    while True:
        health.beat()
        await asyncio.sleep(BEAT_SECONDS)


async def _run_unless_stopped(stopping: asyncio.Event, work: Awaitable[object]) -> bool:
    """Wait for the work. Returns False if the stop signal came first. Raises what the work raises."""
    task = asyncio.ensure_future(work)
    await _wait_for_first(stopping.wait(), task)
    if not task.done():
        task.cancel()
        return False
    task.result()
    return True


async def _wait_for_first(*things: Awaitable[object]) -> None:
    """Wait until one of these is done. Then cancel the unfinished coroutines, but leave tasks running."""
    tasks = [asyncio.ensure_future(thing) for thing in things]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task, thing in zip(tasks, things, strict=True):
        if task is not thing:
            task.cancel()


@asynccontextmanager
async def _elector(configuration: Configuration, settings: Settings, timeouts: Timeouts) -> AsyncIterator[Elector]:
    """Create this replica's elector, with connections of its own."""
    api = Api(configuration, request_timeout=timeouts.lease_renew_deadline / 2)
    timing = LeaseTiming(timeouts.lease_duration, timeouts.lease_renew_deadline, timeouts.lease_retry)
    try:
        yield Elector(LeaseObject(api, settings.lease_namespace, settings.lease_name), settings.identity, timing)
    finally:
        await api.close()

"""Runs reconcile passes: takes a key, gathers, decides, executes, logs the decision and schedules the next pass.

A second pass over a job follows only if the first pass had an effect, or after a pause, or upon a new event. An effect is
something that the API server has carried out: a status write, an accepted delete, a new object (`PassOutcome.ACTED`). A pass that
only repeated what was already done, or that was outdated, has no effect. A job whose passes keep having effects is paused too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime

from finetune_operator.cache.projection import CachedObject
from finetune_operator.client.answers import ApiError, ApiUnreachableError
from finetune_operator.client.kinds import JobKey
from finetune_operator.decide.actions import Actions
from finetune_operator.decide.operator_error import FAILURES_BEFORE_REPORT, is_reported, with_error_kept
from finetune_operator.decide.reconcile import reconcile
from finetune_operator.decide.seen.observed import Observed
from finetune_operator.logs import logger
from finetune_operator.metrics.metrics import Metrics
from finetune_operator.passes.execute import Executor, PassOutcome
from finetune_operator.passes.gather import Gatherer
from finetune_operator.queue.workqueue import QueueClosedError, Urgency, WorkQueue

_log = logger(__name__)
MOST_ACTS_IN_A_ROW = 8
"""Maximum number of passes with an effect in a row before a pause. Normally a job has at most four between two waits."""
REST_PER_CPU_SECOND = 20.0
"""After a pass without effect, a job rests for this multiple of the pass's CPU time, so its events cost at most 5 % of a core."""
SHORTEST_PAUSE = 0.05


def urgency(cached: CachedObject | None) -> Urgency:
    """Return how urgent a pass is after an event about this job."""
    is_new = cached is None or cached.summary is None or not cached.summary.conditions
    return Urgency.NEW if is_new else Urgency.CHANGED


@dataclass(frozen=True)
class Worker:
    """Processes keys until the queue is closed. Many workers may run on one loop: no two have the same key at a time."""

    queue: WorkQueue[JobKey]
    gatherer: Gatherer
    executor: Executor
    instruments: Metrics
    now: Callable[[], datetime]
    cpu_clock: Callable[[], float] = time.thread_time
    """CPU seconds of this thread, so that on a busy machine, a job does not rest longer because of other processes."""
    _acts: dict[JobKey, int] = field(default_factory=dict)
    """Job -> number of passes with an effect since the last pass that found nothing to do."""
    _failures: dict[JobKey, int] = field(default_factory=dict)
    """Job -> number of failed passes since the last successful one."""
    _computing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self) -> None:
        """Work until the queue is closed."""
        while True:
            try:
                key = await self.queue.get()
            except QueueClosedError:
                return
            started = time.perf_counter()
            try:
                result = await self._handle(key)
            finally:
                self.queue.done(key)
            self.instruments.reconciled(time.perf_counter() - started, result)

    async def _handle(self, key: JobKey) -> str:
        try:
            return str(await self._reconcile(key))
        except (ApiError, ApiUnreachableError) as error:
            delay = self.queue.retry(key, error.retry_after if isinstance(error, ApiError) else 0.0)
            _log.warning("pass failed", namespace=key.namespace, job=key.name, error=str(error), retry_seconds=delay)
            await self._count_failure(key, error)
            return "error"
        except Exception as error:  # noqa: BLE001
            # A bug that is triggered by one job's content must not end the work on all other jobs.
            delay = self.queue.retry(key)
            _log.exception("pass failed unexpectedly", namespace=key.namespace, job=key.name, retry_seconds=delay)
            await self._count_failure(key, error)
            return "defect"

    async def _count_failure(self, key: JobKey, error: Exception) -> None:
        """Count a failed pass and, after several in a row, report the error in the job's status."""
        self._failures[key] = self._failures.get(key, 0) + 1
        if self._failures[key] < FAILURES_BEFORE_REPORT:
            return
        try:
            await self.executor.report_failure(key, error)
        except Exception as other:  # noqa: BLE001 - the next failure tries again
            _log.warning("failure not reported", namespace=key.namespace, job=key.name, error=str(other))

    async def _reconcile(self, key: JobKey) -> PassOutcome:
        await self._turn()
        now = self.now()
        gathered = await self.gatherer.gather(key, now)
        if gathered is None:
            return self._settle(key, PassOutcome.GONE)
        observed = gathered.observed
        await self._turn()
        begun = self.cpu_clock()
        actions = reconcile(observed, now)
        cpu = gathered.cpu_seconds + self.cpu_clock() - begun
        self.instruments.judged(cpu)
        keeps_error = key in self._failures and is_reported(observed.job.status)
        if keeps_error:
            actions = replace(actions, status=with_error_kept(observed.job.status, actions.status))
        outcome = await self.executor.execute(gathered, actions)
        if outcome is PassOutcome.ACTED:
            _log_decision(observed, actions)
            for finding in actions.news:
                self.instruments.found(finding.rule, finding.severity)
        else:
            self.queue.rest(key, cpu * REST_PER_CPU_SECOND)
        self._settle(key, outcome)
        if outcome is PassOutcome.UNCHANGED and keeps_error:
            # This pass succeeded, so the next one may remove the error from status.
            self.queue.requeue_now(key)
        elif outcome is PassOutcome.UNCHANGED:
            times = [item for item in (actions.requeue_after_seconds, gathered.revisit_after_seconds) if item is not None]
            if times:
                self.queue.add_after(key, max(min(times), SHORTEST_PAUSE))
        return outcome

    async def _turn(self) -> None:
        """Wait until no other pass is computing, so that probes and answers have to wait for one pass, not for all."""
        async with self._computing:
            await asyncio.sleep(0)

    def _settle(self, key: JobKey, outcome: PassOutcome) -> PassOutcome:
        """Schedule the next pass according to the outcome of this one."""
        if outcome in (PassOutcome.UNCHANGED, PassOutcome.GONE):
            self.queue.forget(key)
            self._acts.pop(key, None)
        if outcome is not PassOutcome.OUTDATED:
            self._failures.pop(key, None)
        if outcome in (PassOutcome.OUTDATED, PassOutcome.REPEATED):
            self.queue.retry(key)
        elif outcome is PassOutcome.ACTED:
            self._acts[key] = self._acts.get(key, 0) + 1
            if self._acts[key] <= MOST_ACTS_IN_A_ROW:
                # Events about our own writes bring nothing new and so trigger no pass; the next pass is queued here instead.
                self.queue.requeue_now(key)
            else:
                delay = self.queue.retry(key)
                _log.warning("job keeps changing and is paused", namespace=key.namespace, job=key.name, retry_seconds=delay)
        return outcome


def _log_decision(observed: Observed, actions: Actions) -> None:
    status = actions.status or observed.job.status
    before = {(item.type, item.status, item.reason) for item in observed.job.status.conditions}
    changed = [
        f"{item.type}={item.status}/{item.reason}"
        for item in status.conditions
        if (item.type, item.status, item.reason) not in before
    ]
    _log.info(
        "decided",
        namespace=observed.job.namespace,
        job=observed.job.name,
        phase=status.phase,
        attempt=status.attempt,
        conditions=changed,
        deletes=[f"{item.kind}/{item.name}" for item in actions.deletes],
        creates=[f"{item.kind}/{item.name}" for item in actions.creates],
        events=[str(item.reason) for item in actions.events],
    )

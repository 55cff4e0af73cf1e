"""Runs reconcile passes: takes a key, gathers, decides, executes, logs the decision and schedules the next pass.

Between two passes over a job there is always an effect of the first, a pause, or a new event. An effect is what the API server
carried out: a status write, a delete that it accepted, a create of what did not exist (`PassOutcome.ACTED`). A pass that only
repeated what had been done already, or that was outdated, has no effect. A job whose passes have an effect each time without
ever coming to rest is paused, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import datetime

from finetune_job.api.status import FineTuneJobStatus
from finetune_operator.cluster.answers import ApiError, ApiUnreachableError
from finetune_operator.cluster.cache import JobKey
from finetune_operator.cluster.execute import Executor, PassOutcome
from finetune_operator.cluster.gather import Gathered, Gatherer
from finetune_operator.cluster.projection import CachedObject
from finetune_operator.decide.actions import Actions
from finetune_operator.decide.observed import JobView, Observed
from finetune_operator.decide.operator_error import FAILURES_BEFORE_TOLD, is_told, with_error_kept
from finetune_operator.decide.reconcile import reconcile
from finetune_operator.decide.stage import is_started
from finetune_operator.logs import logger
from finetune_operator.metrics import Instruments
from finetune_operator.workqueue import QueueClosedError, Urgency, WorkQueue

_log = logger(__name__)
MOST_ACTS_IN_A_ROW = 8
"""Passes with an effect that may follow each other at once. A job has at most four between two waits."""
REST_PER_CPU_SECOND = 20.0
"""A job rests so many times the CPU time of its last pass without effect, so that events make it use at most 5 % of a core."""
SHORTEST_PAUSE = 0.05


def urgency(cached: CachedObject | None) -> Urgency:
    """How soon to look at a job after an event about it."""
    is_new = cached is None or cached.summary is None or not cached.summary.conditions
    return Urgency.NEW if is_new else Urgency.CHANGED


TellFailure = Callable[[JobKey, Exception], Awaitable[None]]


async def _report_nothing(_key: JobKey, _error: Exception) -> None:
    """Report nothing."""


Decided = Callable[[JobView, FineTuneJobStatus | None], Awaitable[None]]


@dataclass
class _Overrun:
    """Passes over one generation of a job that took longer than the budget."""

    uid: str
    generation: int
    passes: int = 0


@dataclass(frozen=True)
class Worker:
    """Takes keys until the queue is closed. Any number may run on one loop: the queue hands a key to one at a time."""

    queue: WorkQueue[JobKey]
    gatherer: Gatherer
    executor: Executor
    instruments: Instruments
    now: Callable[[], datetime]
    decided: Decided
    """Called with what a pass has decided before it is written; what it raises puts the pass off."""
    cpu_clock: Callable[[], float] = time.thread_time
    """CPU seconds of this thread, so that on a busy machine no job is refused for the time that others took."""
    pass_budget: float = 1.0
    """CPU seconds that reading and judging one job may take. They hold up the loop, so a job that is not started and exceeds
    them twice is refused; a started one is only looked at less often."""
    tell_failure: TellFailure = _report_nothing
    """Called with the error of a pass after many failures in a row, to report it in the job's status."""
    _acts: dict[JobKey, int] = field(default_factory=dict)
    """Passes with an effect since the last one that found nothing to do."""
    _overruns: dict[JobKey, _Overrun] = field(default_factory=dict)
    _failures: dict[JobKey, int] = field(default_factory=dict)
    """Passes that failed since the last one that ended well."""
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
            # A defect that one job's content brings to light must not end the work on all others.
            delay = self.queue.retry(key)
            _log.exception("pass failed unexpectedly", namespace=key.namespace, job=key.name, retry_seconds=delay)
            await self._count_failure(key, error)
            return "defect"

    async def _count_failure(self, key: JobKey, error: Exception) -> None:
        """Count a failure, and report it in the status of the job after several in a row."""
        self._failures[key] = self._failures.get(key, 0) + 1
        if self._failures[key] < FAILURES_BEFORE_TOLD:
            return
        try:
            await self.tell_failure(key, error)
        except Exception as other:  # noqa: BLE001 - the next failure tries again
            _log.warning("failure not told", namespace=key.namespace, job=key.name, error=str(other))

    async def _reconcile(self, key: JobKey) -> PassOutcome:
        await self._turn()
        now = self.now()
        gathered = await self.gatherer.gather(key, now)
        if gathered is None:
            return self._settle(key, PassOutcome.GONE)
        observed = self._marked(key, gathered.observed)
        await self._turn()
        begun = self.cpu_clock()
        actions = reconcile(observed, now)
        cpu = gathered.cpu_seconds + self.cpu_clock() - begun
        self.instruments.judged(cpu)
        if cpu > self.pass_budget and not observed.too_complex:
            overruns = self._overran(key, observed.job, cpu)
            if not is_started(observed.job.status):
                if overruns == 1:
                    # It may be chance, so nothing is done before it is measured once more.
                    self.queue.rest(key, cpu * REST_PER_CPU_SECOND)
                    return self._settle(key, PassOutcome.REPEATED)
                observed = replace(observed, too_complex=True)
                actions = reconcile(observed, now)
        keeps_error = key in self._failures and is_told(observed.job.status)
        if keeps_error:
            actions = replace(actions, status=with_error_kept(observed.job.status, actions.status))
        await self.decided(observed.job, actions.status)
        outcome = await self.executor.execute(gathered, actions)
        if outcome is PassOutcome.ACTED:
            _log_decision(observed, actions)
            for finding in actions.news:
                self.instruments.found(finding.rule, finding.severity)
        else:
            self.queue.rest(key, cpu * REST_PER_CPU_SECOND)
        self._settle(key, outcome)
        if outcome is PassOutcome.UNCHANGED and keeps_error:
            # This pass went well, so the next one may remove the error.
            self.queue.requeue_now(key)
        elif outcome is PassOutcome.UNCHANGED:
            self._requeue(key, gathered, actions)
        return outcome

    async def _turn(self) -> None:
        """Wait until no other pass computes in this round of the loop: a probe or an answer waits for one pass, not for all."""
        async with self._computing:
            await asyncio.sleep(0)

    def _settle(self, key: JobKey, outcome: PassOutcome) -> PassOutcome:
        """Schedule the next pass by how this one ended."""
        if outcome in (PassOutcome.UNCHANGED, PassOutcome.GONE):
            self.queue.forget(key)
            self._acts.pop(key, None)
        if outcome is not PassOutcome.OUTDATED:
            self._failures.pop(key, None)
        if outcome is PassOutcome.GONE:
            self._overruns.pop(key, None)
        elif outcome in (PassOutcome.OUTDATED, PassOutcome.REPEATED):
            self.queue.retry(key)
        elif outcome is PassOutcome.ACTED:
            self._acts[key] = self._acts.get(key, 0) + 1
            if self._acts[key] <= MOST_ACTS_IN_A_ROW:
                # Events of our own writes are known already and wake no pass, so the next pass is queued here.
                self.queue.requeue_now(key)
            else:
                delay = self.queue.retry(key)
                _log.warning("job does not come to rest", namespace=key.namespace, job=key.name, retry_seconds=delay)
        return outcome

    def _marked(self, key: JobKey, observed: Observed) -> Observed:
        overrun = self._overruns.get(key)
        if overrun is None:
            return observed
        if (overrun.uid, overrun.generation) != (observed.job.uid, observed.job.generation):
            del self._overruns[key]
            return observed
        return replace(observed, too_complex=overrun.passes > 1)

    def _overran(self, key: JobKey, job: JobView, cpu: float) -> int:
        """Count a pass over its budget. Returns how many this generation has had."""
        overrun = self._overruns.setdefault(key, _Overrun(job.uid, job.generation))
        overrun.passes += 1
        _log.warning("pass over its budget", namespace=job.namespace, job=job.name, cpu_seconds=round(cpu, 3))
        return overrun.passes

    def _requeue(self, key: JobKey, gathered: Gathered, actions: Actions) -> None:
        times = [item for item in (actions.requeue_after_seconds, gathered.revisit_after_seconds) if item is not None]
        if times:
            self.queue.add_after(key, max(min(times), SHORTEST_PAUSE))


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
        relabels=[f"Pod/{item.name}={item.attempt}" for item in actions.relabels],
        events=[str(item.reason) for item in actions.events],
    )

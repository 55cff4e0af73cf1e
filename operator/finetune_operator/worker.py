"""One reconcile pass: take a key, gather, decide, execute; what to log and when to look again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from finetune_operator.cluster.cache import JobKey
from finetune_operator.cluster.errors import ApiError, ApiUnreachableError
from finetune_operator.cluster.execute import Executor, Outcome
from finetune_operator.cluster.gather import Gathered, Gatherer
from finetune_operator.decide.actions import Actions
from finetune_operator.decide.observed import Observed
from finetune_operator.decide.reconcile import reconcile
from finetune_operator.logs import logger
from finetune_operator.metrics import Instruments
from finetune_operator.workqueue import QueueClosedError, WorkQueue

_log = logger(__name__)


@dataclass(frozen=True)
class Worker:
    """Takes keys until the queue is closed. Any number may run on one loop: the queue hands a key to one at a time."""

    queue: WorkQueue[JobKey]
    gatherer: Gatherer
    executor: Executor
    instruments: Instruments
    now: Callable[[], datetime]

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
            result = await self._reconcile(key)
        except (ApiError, ApiUnreachableError) as error:
            delay = self.queue.retry(key, error.retry_after if isinstance(error, ApiError) else 0.0)
            _log.warning("pass failed", namespace=key.namespace, job=key.name, error=str(error), retry_seconds=delay)
            return "error"
        except Exception:  # noqa: BLE001
            # A defect that one job's content brings to light must not end the work on all others.
            delay = self.queue.retry(key)
            _log.exception("pass failed unexpectedly", namespace=key.namespace, job=key.name, retry_seconds=delay)
            return "defect"
        self.queue.forget(key)
        return str(result)

    async def _reconcile(self, key: JobKey) -> Outcome:
        now = self.now()
        gathered = await self.gatherer.gather(key, now)
        if gathered is None or gathered.observed.job.deleting:
            return Outcome.GONE
        actions = reconcile(gathered.observed, now)
        outcome = await self.executor.execute(gathered, actions)
        if outcome is Outcome.ACTED:
            _log_decision(gathered.observed, actions)
            for finding in actions.news:
                self.instruments.found(finding.rule, finding.severity)
        if outcome in (Outcome.ACTED, Outcome.OUTDATED):
            # Echoes of our own writes are known already and wake nobody, so what they allow next is looked at here.
            self.queue.add(key)
        elif outcome is Outcome.UNCHANGED:
            self._look_again(key, gathered, actions)
        return outcome

    def _look_again(self, key: JobKey, gathered: Gathered, actions: Actions) -> None:
        times = [item for item in (actions.requeue_after_seconds, gathered.revisit_after_seconds) if item is not None]
        if times:
            self.queue.add_after(key, max(min(times), 0.05))


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

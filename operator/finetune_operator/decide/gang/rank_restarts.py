"""Adds restarts of ranks within the pod of a single-pod gang to status. The pod's supervisor carries the restarts out.

The restarts are read from the latest progress of rank 0, and from the pod's report once the pod has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from finetune_job.api.status import RestartInPod
from finetune_job.failures import MOST_RESTARTS_IN_POD, PROCESS_FAILURES, RankRestart, parse_envelope
from finetune_job.finding import MAX_TEXT_LENGTH
from finetune_job.names import Role
from finetune_job.reasons import Reason
from finetune_operator.children.frozen_run import FrozenRun
from finetune_operator.decide.failures.restart_policy import RestartDecision, counters_after, with_progress
from finetune_operator.decide.gang.attempts import newest_checkpoint, record_of, with_record
from finetune_operator.decide.pass_result import PassResult
from finetune_operator.decide.seen.observed import Observed
from finetune_operator.decide.seen.times import timestamp


def restarts_allowed(observed: Observed, run: FrozenRun) -> int:
    """Maximum number of times that the ranks of a new attempt may be restarted within their pod."""
    spec, counted = observed.job.spec, observed.job.status.restarts.counted
    return 0 if spec is None else max(0, min(run.placement.restarts_in_pod, spec.run.max_restarts - counted))


def with_rank_restarts(observed: Observed, result: PassResult, attempt: int) -> Observed:
    """Record restarts that are not in status yet. Returns `observed` with these restarts in its status.

    This requires that the attempt has a record, which is opened when its pods are first seen running.
    """
    status = observed.job.status
    record = record_of(status, Role.TRAIN, attempt)
    known = 0 if record is None else len(record.restarts)
    restarts = _reported(observed, attempt)
    if record is None or len(restarts) <= known:
        return observed
    counters = with_progress(status.restarts, newest_checkpoint(status, Role.TRAIN))
    for restart in restarts[known:]:
        counters = counters_after(RestartDecision.RESTART_COUNTED, restart.failure, counters, result.now)
        message = f"Attempt {attempt} of train continues in its pod after a failure: {restart.failure}: {restart.message}"
        result.emit("Warning", Reason.RESTARTING, message)
    recorded = [
        RestartInPod(
            failure=restart.failure,
            message=restart.message[:MAX_TEXT_LENGTH],
            rank=restart.rank,
            step=restart.step,
            time=timestamp(datetime.fromtimestamp(max(restart.time, 0.0), UTC)),
        )
        for restart in restarts[known:]
    ]
    records = with_record(status, record.model_copy(update={"restarts": [*record.restarts, *recorded]}))
    result.set(attempts=records, restarts=counters)
    job = replace(observed.job, status=status.model_copy(update={"attempts": records, "restarts": counters}))
    return replace(observed, job=job)


def _reported(observed: Observed, attempt: int) -> Sequence[RankRestart]:
    """The longest reported list of restarts; empty if it is implausible, because a container can claim anything."""
    reports = [parse_envelope(pod.termination_message) for pod in observed.pods_of(Role.TRAIN, attempt)]
    lists = [report.restarts for report in reports if report is not None]
    if observed.progress is not None and observed.progress.attempt == attempt:
        lists.append(observed.progress.restarts)
    restarts = max(lists, key=len, default=[])[:MOST_RESTARTS_IN_POD]
    return restarts if all(restart.failure in PROCESS_FAILURES for restart in restarts) else ()

"""The end of a job: success, failure or cancellation. The outcome is final at once, and nothing is created after it; the job is
finished once nothing of it runs any more.
"""

from __future__ import annotations

from finetune_job.api.status import Attempt, FineTuneJobStatus
from finetune_job.reasons import STAGES, ConditionType, Reason
from finetune_job.status.conditions import find, is_true
from finetune_operator.decide.clock import timestamp
from finetune_operator.decide.observed import Observed
from finetune_operator.decide.pass_result import PassResult
from finetune_operator.decide.retention import still_running, stop_running
from finetune_operator.decide.stage import is_started

REQUEUE_SECONDS = 30.0
"""While the last pods end: their events wake the job, and this if one is lost."""


def finish_succeeded(observed: Observed, result: PassResult, message: str) -> None:
    """All stages are done."""
    _end(observed, result, True, Reason.COMPLETED, message)


def finish_failed(observed: Observed, result: PassResult, reason: Reason, message: str) -> None:
    """The first stage that is not done failed, and is not tried again."""
    _end_stage(observed.job.status, result, reason, message)
    _end_attempt(observed, result, message)
    _end(observed, result, False, reason, message)


def finish_cancelled(observed: Observed, result: PassResult) -> None:
    """The user ended the job."""
    message = "spec.run.cancel is true."
    _end_stage(observed.job.status, result, Reason.CANCELLED, message)
    _end_attempt(observed, result, "Cancelled.")
    _end(observed, result, False, Reason.CANCELLED, message)


def conclude(observed: Observed, result: PassResult) -> None:
    """A pass over a job whose outcome is decided: finished as soon as nothing of it runs."""
    succeeded = find(observed.job.status.conditions, ConditionType.SUCCEEDED)
    if succeeded is not None:
        # Another release, or whoever edited the status, may have written a word that this one does not know.
        known = next((reason for reason in Reason if reason == succeeded.reason), Reason.FAILED)
        _finish(observed, result, succeeded.status == "True", known, succeeded.message)


def _end(observed: Observed, result: PassResult, succeeded: bool, reason: Reason, message: str) -> None:
    result.condition(ConditionType.SUCCEEDED, succeeded, reason, message)
    result.condition(ConditionType.READY, False, reason, "")
    result.condition(ConditionType.STALLED, False, Reason.HEALTHY)
    result.condition(ConditionType.SUSPENDED, False, Reason.NOT_SUSPENDED)
    result.emit("Normal" if succeeded or reason is Reason.CANCELLED else "Warning", reason, message)
    _finish(observed, result, succeeded, reason, message)


def _finish(observed: Observed, result: PassResult, succeeded: bool, reason: Reason, message: str) -> None:
    """Finished, if it is certain that nothing runs: the watches may not have told of every pod of a gang that has failed.

    A Job that succeeded has no other pods.
    """
    stop_running(observed, result)
    running = still_running(observed)
    is_certain = succeeded or observed.live is not None or not is_started(observed.job.status)
    if is_certain and not running:
        result.set(completion_time=timestamp(result.now))
        result.condition(ConditionType.FINISHED, True, reason, message)
        return
    waits = f"Waiting until {running} has ended." if running else "Looking whether anything of it still runs."
    result.condition(ConditionType.FINISHED, False, Reason.STOPPING, waits)
    result.requeue_after(REQUEUE_SECONDS)


def _end_stage(status: FineTuneJobStatus, result: PassResult, reason: Reason, message: str) -> None:
    stage = next((kind for kind in STAGES if not is_true(status.conditions, kind)), None)
    if stage is not None:
        result.condition(stage, False, reason, message)


def _end_attempt(observed: Observed, result: PassResult, message: str) -> None:
    """Close the record of an attempt that still runs; one that was closed in this pass keeps its evidence."""
    if result.has_value("attempts"):
        return
    attempts = observed.job.status.attempts
    if attempts and attempts[-1].outcome == "Running":
        closed: Attempt = attempts[-1].model_copy(
            update={"outcome": "Failed", "end_time": timestamp(result.now), "message": message}
        )
        result.set(attempts=[*attempts[:-1], closed])

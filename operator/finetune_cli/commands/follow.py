"""Reads jobs repeatedly, until a job has changed, has ended, or has a condition."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from finetune_cli.cluster.errors import ClusterError
from finetune_cli.cluster.objects import Cluster
from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_cli.jobs.seen import SeenJob
from finetune_job.conditions import find_condition, is_condition_true
from finetune_job.reasons import ConditionType

POLL_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 30.0
MOST_FAILURES = 8
"""Number of failed requests in a row after which a command gives up."""
_T = TypeVar("_T")


def repeatedly(
    read: Callable[[], _T],
    report: Callable[[str], None],
    until: Callable[[_T | None], bool],
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[_T]:
    """Yield what `read` returns, every two seconds, until `until` accepts the latest value (None: there is none yet).

    If the cluster does not answer, report that once and try again. Raises ClusterError for an error that a retry cannot fix, such
    as a missing permission; after `MOST_FAILURES` errors in a row; or if `until` accepts None before the first answer.
    """
    failures, latest = 0, None
    while True:
        try:
            latest = read()
        except ClusterError as error:
            failures += 1
            is_passing = error.status is None or error.status == 429 or error.status >= 500
            if not is_passing or failures >= MOST_FAILURES or (latest is None and until(None)):
                raise
            if failures == 1:
                report(f"{error}; trying again")
        else:
            failures = 0
            yield latest
        if until(latest):
            return
        pause(min(POLL_SECONDS * 2.0**failures, LONGEST_PAUSE_SECONDS))


def wanted_condition(text: str) -> ConditionType:
    """Parse the condition of `--for`: `Finished`, or `condition=Finished` as for kubectl. Raises LocalError."""
    name = text.removeprefix("condition=").removesuffix("=True")
    condition = next((kind for kind in ConditionType if kind.casefold() == name.casefold()), None)
    if condition is None:
        raise LocalError(f"--for: {text!r} is not a condition of a job; it is one of {', '.join(ConditionType)}")
    return condition


def outcome(job: SeenJob, wanted: ConditionType) -> ExitCode | None:
    """Return DONE if the condition is True, REFUSED if it will not become True by itself, and None otherwise."""
    conditions = job.status.conditions
    if is_condition_true(conditions, wanted):
        has_failed = wanted is ConditionType.FINISHED and job.phase != "Succeeded"
        return ExitCode.REFUSED if has_failed else ExitCode.DONE
    if job.has_ended:
        return ExitCode.REFUSED
    stalled = find_condition(conditions, ConditionType.STALLED)
    # A condition that was observed for an earlier spec says nothing about the current spec.
    is_current = stalled is not None and stalled.observed_generation >= job.generation
    return ExitCode.REFUSED if job.phase == "Stalled" and is_current else None


def wait_for(
    cluster: Cluster,
    name: str,
    wanted: ConditionType,
    seconds: float,
    report: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> tuple[ExitCode, SeenJob | None]:
    """Wait for a condition. Return the exit code (FAILED if the time ran out) and the job (None if it was deleted).

    Raises ClusterError.
    """
    deadline = clock() + seconds
    latest: SeenJob | None = None

    def read() -> SeenJob | None:
        try:
            return cluster.job(name)
        except ClusterError as error:
            if error.exit_code is ExitCode.UNUSABLE and latest is not None:
                return None
            raise

    for job in repeatedly(read, report, lambda _: clock() > deadline, pause):
        if job is None or (latest is not None and job.uid != latest.uid):
            return ExitCode.REFUSED, None
        latest = job
        code = outcome(job, wanted)
        if code is not None:
            return code, job
    return ExitCode.FAILED, latest

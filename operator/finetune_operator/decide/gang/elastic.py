"""Decides on how many nodes an attempt of an elastic gang runs.

A gang first asks for all nodes. It continues on fewer if some nodes do not become available, or if a node is lost or reclaimed,
and asks for all nodes again later. Whether they are free is not known in advance, because nodes are not read; it turns out only
when the queue and the scheduler place the next attempt's Job. A queue admits all pods of a Job or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from finetune_job.api.status import Attempt, FineTuneJobStatus, ProgressStatus
from finetune_job.conditions import find_condition
from finetune_job.names import Role
from finetune_job.plan.launch_plan import LaunchPlan
from finetune_job.progress import Progress
from finetune_job.reasons import AttemptOutcome, ConditionType
from finetune_operator.decide.seen.children_seen import BatchJobView, PodView
from finetune_operator.decide.seen.times import moment_after

MOST_DOUBLINGS = 3
"""Maximum number of times that the wait before asking for all nodes again is doubled."""


@dataclass(frozen=True)
class Elasticity:
    """Sizes and waiting times of an elastic gang, from its plan."""

    fewest: int
    most: int
    """Minimum and maximum number of nodes."""
    shrink_after: timedelta
    grow_after: timedelta
    is_queued: bool
    """Whether its Jobs wait in a queue."""


def elasticity(plan: LaunchPlan) -> Elasticity | None:
    """Return the limits of an elastic gang; None if the gang is not elastic."""
    ranks, placement = plan.parallelism, plan.placement
    if ranks.min_nodes is None or placement is None or placement.elastic is None:
        return None
    waits, is_queued = placement.elastic, placement.pods.train.queue_name is not None
    return Elasticity(
        fewest=min(ranks.min_nodes, ranks.nodes),
        most=ranks.nodes,
        shrink_after=timedelta(seconds=waits.shrink_after_seconds),
        grow_after=timedelta(seconds=waits.grow_after_seconds),
        is_queued=is_queued,
    )


def gang_nodes(plan: LaunchPlan, wanted: int | None) -> int:
    """Number of pods of an attempt. `wanted`: `status.gangNodes`, which may have been edited by hand; None means all nodes."""
    limits = elasticity(plan)
    return plan.parallelism.nodes if limits is None or wanted is None else min(max(wanted, limits.fewest), limits.most)


def nodes_after_failure(limits: Elasticity, nodes: int, pods: Sequence[PodView]) -> int:
    """Number of nodes for the attempt after a failed one: as many as before, minus those that were lost or reclaimed.

    A reclaimed node may be replaced, but the gang does not wait for that. If no node is left, all nodes are requested, and the
    gang starts on those that become available first.
    """
    lost = len({pod.node_rank for pod in pods if pod.disruption})
    return limits.most if lost >= nodes else max(nodes - lost, limits.fewest)


def nodes_that_came(limits: Elasticity, nodes: int, pods: Sequence[PodView], since: datetime, now: datetime) -> int | None:
    """Number of nodes to start on if, after the wait, only some pods have a node but those are enough; None to wait longer."""
    placed = len({pod.node_rank for pod in pods if pod.scheduled is not None and pod.deletion_requested is None})
    return placed if limits.fewest <= placed < nodes and now >= since + limits.shrink_after else None


def queued_since(status: FineTuneJobStatus, batch_job: BatchJobView) -> datetime:
    """When a suspended Job began to wait for its queue: when preflight's gate was removed, or when it was preempted."""
    prepared = find_condition(status.conditions, ConditionType.PREPARED)
    times = [batch_job.created, moment_after(prepared.last_transition_time, 0.0) if prepared is not None else None]
    times += [condition.since for condition in batch_job.conditions if condition.type == "Suspended"]
    return max(moment for moment in times if moment is not None)


def nodes_to_queue_for(limits: Elasticity, nodes: int, attempts: Sequence[Attempt], since: datetime, now: datetime) -> int | None:
    """Number of nodes to ask the queue for if it has not admitted the gang in time: as many as the gang last ran on, if that is
    fewer, else half as many. None means to wait longer.
    """
    if nodes <= limits.fewest or now < since + limits.shrink_after:
        return None
    last = next(
        (attempt.nodes for attempt in reversed(_training(attempts)) if attempt.running_time and attempt.nodes is not None), nodes
    )
    return max(last if last < nodes else nodes // 2, limits.fewest)


def grows(
    limits: Elasticity,
    nodes: int,
    attempts: Sequence[Attempt],
    now: datetime,
    *,
    progress: Progress | None,
    before: ProgressStatus | None,
) -> bool:
    """Whether to stop a running gang in order to ask for all nodes: long enough after its start, when a checkpoint has just
    become complete, and unless the gang would finish within the same time.

    attempts: the job's attempts; the last is the running one, once it is recorded. progress: latest progress of the running
    attempt. before: the progress in status.
    """
    running = _training(attempts)
    if nodes >= limits.most or progress is None or progress.checkpoint_step is None:
        return False
    if not running or running[-1].number != progress.attempt:
        return False
    known = before.checkpoint_step if before is not None else None
    if known is None or progress.checkpoint_step <= known:
        return False
    patience = limits.grow_after.total_seconds() * 2 ** min(_failed_tries(running), MOST_DOUBLINGS)
    due = moment_after(running[-1].running_time or running[-1].start_time, patience)
    is_nearly_done = progress.seconds_left is not None and progress.seconds_left < patience
    return due is not None and now >= due and not is_nearly_done


def _training(attempts: Sequence[Attempt]) -> list[Attempt]:
    return [attempt for attempt in attempts if attempt.role is Role.TRAIN]


def _failed_tries(attempts: Sequence[Attempt]) -> int:
    """Count the attempts directly before the current one that were resized without ever running, for lack of nodes."""
    tries = 0
    for attempt in reversed(attempts[:-1]):
        if attempt.outcome is not AttemptOutcome.RESIZED:
            break
        tries += not attempt.running_time
    return tries

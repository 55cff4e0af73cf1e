"""Chooses the pods whose logs are read, and recognises the lines of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from finetune_cli.jobs.progress import stage_name
from finetune_cli.jobs.seen import SeenJob, SeenPod
from finetune_job.names import Role


@dataclass(frozen=True)
class LogRequest:
    """The logs that the options of `logs` request."""

    stage: Role | None = None
    """The stage; None: the current one, or the latest that has pods."""
    attempt: int | None = None
    """The attempt; None: the latest."""
    rank: int | None = None
    """Rank of training; None: all ranks."""
    failed: bool = False
    """Only pods that ended without success."""
    follow: bool = False
    since_seconds: int | None = None
    tail: int | None = None
    """Lines of each pod or rank, from the end; None: all."""


def chosen_pods(job: SeenJob, pods: Sequence[SeenPod], request: LogRequest) -> list[SeenPod]:
    """Return the pods of one stage and attempt, in the order of their node ranks."""
    candidates = [pod for pod in pods if not request.failed or pod.phase == "Failed"]
    stage = str(request.stage) if request.stage is not None else _stage(job, candidates)
    candidates = [pod for pod in candidates if pod.role == stage]
    attempt = request.attempt if request.attempt is not None else max((pod.attempt for pod in candidates), default=0)
    node = None if request.rank is None else request.rank // ranks_per_node(job)
    return sorted(
        (pod for pod in candidates if pod.attempt == attempt and node in (None, pod.node_rank)),
        key=lambda pod: (pod.node_rank, pod.name),
    )


def _stage(job: SeenJob, pods: Sequence[SeenPod]) -> str:
    """Return the current stage if it has pods, else the stage of the newest pod."""
    current = stage_name(job)
    return current if any(pod.role == current for pod in pods) else pods[-1].role if pods else current


def ranks_per_node(job: SeenJob) -> int:
    """Return how many ranks a pod of the gang runs."""
    return max(job.num_ranks // job.num_nodes, 1)


def is_of_rank(line: str, rank: int | None) -> bool:
    """Whether a line of a training pod's log comes from a rank; the pod prefixes each line with `[rank N]`."""
    return rank is None or line.startswith(f"[rank {rank}] ")

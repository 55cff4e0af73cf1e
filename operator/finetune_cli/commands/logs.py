"""`finetune logs` of a job in a cluster: of pods that exist, and of those that are gone from the workspace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from finetune_cli.cluster.errors import ClusterError
from finetune_cli.cluster.objects import Cluster
from finetune_cli.cluster.pod_logs import MOST_FOLLOWED, followed_lines, pod_lines
from finetune_cli.cluster.reader_pod import read_workspace
from finetune_cli.exit_codes import LocalError
from finetune_cli.jobs.plain import harmless, plain
from finetune_cli.jobs.pod_logs import LogRequest, chosen_pods, is_of_rank, ranks_per_node
from finetune_cli.jobs.seen import SeenJob, SeenPod
from finetune_job.layout import WorkspaceLayout
from finetune_job.names import Role
from finetune_job.reasons import AttemptOutcome


@dataclass(frozen=True)
class LogOptions:
    """Options that limit what is shown."""

    follow: bool = False
    since_seconds: int | None = None
    tail: int | None = None
    """Lines of each pod or rank; None: all."""


def log_lines(cluster: Cluster, name: str, request: LogRequest, options: LogOptions) -> Iterator[str]:
    """Harmless lines, with the pod's name in front if there are several. Raises LocalError."""
    job = cluster.job(name)
    if request.rank is not None and not 0 <= request.rank < job.num_ranks:
        raise LocalError(
            f"--rank: {request.rank} is not a rank of {job.title}, which has {job.num_ranks}; write 0 to {job.num_ranks - 1}"
        )
    pods = chosen_pods(job, cluster.pods_of(job), request)
    readable = [pod for pod in pods if pod.has_logs]
    if readable:
        yield from _of_pods(cluster, job, readable, request, options)
    elif pods:
        states = "; ".join(f"{pod.name}: {_state(pod)}" for pod in pods[:5])
        raise ClusterError(f"{job.title}: no container of these pods has run yet ({plain(states, 500)}); try again later")
    else:
        yield from _of_workspace(cluster, job, request, options)


def _state(pod: SeenPod) -> str:
    return next((f"{one.reason or one.state}" for one in pod.containers if one.state), pod.phase or "unknown")


def _of_pods(cluster: Cluster, job: SeenJob, pods: list[SeenPod], request: LogRequest, options: LogOptions) -> Iterator[str]:
    query = {
        **({"sinceSeconds": str(max(options.since_seconds, 1))} if options.since_seconds is not None else {}),
        **({"tailLines": str(options.tail)} if options.tail is not None else {}),
    }
    rank = request.rank if pods[0].role == Role.TRAIN else None
    if options.follow:
        if len(pods) > MOST_FOLLOWED:
            raise LocalError(f"--follow: {len(pods)} pods are more than {MOST_FOLLOWED} at once; choose one with --rank")
        lines = followed_lines(cluster, job.namespace, pods, query)
    else:
        lines = ((pod, line) for pod in pods for line in pod_lines(cluster, job.namespace, pod, query, follow=False))
    for pod, line in lines:
        if is_of_rank(line, rank):
            yield (f"[{pod.name}] " if len(pods) > 1 else "") + harmless(line)


def _of_workspace(cluster: Cluster, job: SeenJob, request: LogRequest, options: LogOptions) -> Iterator[str]:
    """Logs of training are kept on the workspace, those of the other stages go with their pods."""
    stage = request.stage or Role.TRAIN
    attempts = [each.number for each in job.attempts_of(stage) if not request.failed or each.outcome is AttemptOutcome.FAILED]
    if not attempts:
        raise ClusterError(
            f"{job.title}: there is no {'failed ' if request.failed else ''}attempt of {stage} whose log could be read"
        )
    attempt = request.attempt if request.attempt is not None else attempts[-1]
    if stage is not Role.TRAIN:
        raise ClusterError(
            f"{job.title}: the pods of {stage} are gone, and their logs with them; only those of training are kept on the "
            f"workspace. `{job.command('explain')}` shows what they reported"
        )
    if options.since_seconds is not None:
        raise LocalError("--since: the logs that are kept on the workspace have no times; use --tail")
    folder = str(WorkspaceLayout(Path()).logs(stage, attempt))
    names = [folder] if request.rank is None else [f"{folder}/rank-{request.rank:05d}.log"]
    seen = False
    with closing(read_workspace(cluster, job, names, options.tail or 0)) as printed:
        for each in printed:
            line, file = each.get("line"), str(each.get("file", ""))
            if isinstance(line, str):
                seen = True
                yield f"[{plain(file.rpartition('/')[2].removesuffix('.log'), 40)}] {harmless(line)}"
            elif each.get("cut") is True:
                yield f"-- only the end of {plain(file or 'what there is', 200)} is shown"
    if not seen:
        nodes = f"{ranks_per_node(job)} ranks per pod"
        raise ClusterError(f"{job.title}: the workspace holds no log of attempt {attempt} of {stage} ({folder}, {nodes})")

"""`finetune logs` of a job in a cluster: reads the logs from its pods or, if the pods are gone, from its workspace."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from finetune_cli.cluster.errors import ClusterError
from finetune_cli.cluster.objects import Cluster, collection
from finetune_cli.cluster.reader_pod import read_workspace
from finetune_cli.exit_codes import LocalError
from finetune_cli.jobs.plain import harmless, plain
from finetune_cli.jobs.pod_logs import LogRequest, chosen_pods, is_of_rank, ranks_per_node
from finetune_cli.jobs.seen import SeenJob, SeenPod
from finetune_job.layout import WorkspaceLayout
from finetune_job.names import Role
from finetune_job.reasons import AttemptOutcome
from finetune_operator.children.pod_template import CONTAINER_NAME

MOST_FOLLOWED = 64
"""Maximum number of pods whose logs are followed at once, each over its own connection."""
_MOST_WAITING = 10_000
"""Maximum number of lines that wait to be printed."""


def log_lines(cluster: Cluster, name: str, request: LogRequest) -> Iterator[str]:
    """Yield escaped lines, each prefixed with the pod's name if there are several pods. Raises LocalError."""
    job = cluster.job(name)
    if request.rank is not None and not 0 <= request.rank < job.num_ranks:
        raise LocalError(
            f"--rank: {request.rank} is not a rank of {job.title}, which has {job.num_ranks}; write 0 to {job.num_ranks - 1}"
        )
    pods = chosen_pods(job, cluster.pods_of(job), request)
    readable = [pod for pod in pods if pod.has_logs]
    if readable:
        yield from _of_pods(cluster, job, readable, request)
    elif pods:
        states = "; ".join(f"{pod.name}: {_state(pod)}" for pod in pods[:5])
        raise ClusterError(f"{job.title}: no container of these pods has run yet ({plain(states, 500)}); try again later")
    else:
        yield from _of_workspace(cluster, job, request)


def _state(pod: SeenPod) -> str:
    states = (container.reason or container.state for container in pod.containers if container.state)
    return next(states, pod.phase or "unknown")


def _of_pods(cluster: Cluster, job: SeenJob, pods: list[SeenPod], request: LogRequest) -> Iterator[str]:
    query = {
        **({"sinceSeconds": str(max(request.since_seconds, 1))} if request.since_seconds is not None else {}),
        **({"tailLines": str(request.tail)} if request.tail is not None else {}),
    }
    rank = request.rank if pods[0].role == Role.TRAIN else None
    if request.follow:
        if len(pods) > MOST_FOLLOWED:
            raise LocalError(f"--follow: {len(pods)} pods are more than {MOST_FOLLOWED} at once; choose one with --rank")
        lines = _followed_lines(cluster, job.namespace, pods, query)
    else:
        lines = ((pod, line) for pod in pods for line in _pod_lines(cluster, job.namespace, pod, query, follow=False))
    for pod, line in lines:
        if is_of_rank(line, rank):
            yield (f"[{pod.name}] " if len(pods) > 1 else "") + harmless(line)


def _pod_lines(cluster: Cluster, namespace: str, pod: SeenPod, query: Mapping[str, str], *, follow: bool) -> Iterator[str]:
    """Yield the lines of the log of a pod. Raises ClusterError."""
    path = f"{collection('v1', 'pods', namespace)}/{pod.name}/log"
    # The container is named because a service mesh may have added others to the pod.
    asked = {"container": CONTAINER_NAME, **query, **({"follow": "true"} if follow else {})}
    # Following a log has no time limit, because the pod may print nothing for a long time.
    yield from cluster.lines(path, asked, None if follow else 30.0)


def _followed_lines(
    cluster: Cluster, namespace: str, pods: Sequence[SeenPod], query: Mapping[str, str]
) -> Iterator[tuple[SeenPod, str]]:
    """Yield the lines of all pods as they arrive, until all pods have ended. Raises ClusterError if a pod cannot be read."""
    lines: queue.Queue[tuple[SeenPod, str | ClusterError | None]] = queue.Queue(_MOST_WAITING)

    def read(pod: SeenPod) -> None:
        try:
            for line in _pod_lines(cluster, namespace, pod, query, follow=True):
                lines.put((pod, line))
        except ClusterError as error:
            lines.put((pod, error))
        else:
            lines.put((pod, None))

    for pod in pods:
        # A thread that waits for a silent pod must not keep the command from ending.
        threading.Thread(target=read, args=(pod,), daemon=True).start()
    open_pods = len(pods)
    while open_pods:
        pod, line = lines.get()
        if isinstance(line, ClusterError):
            raise line
        if line is None:
            open_pods -= 1
        else:
            yield pod, line


def _of_workspace(cluster: Cluster, job: SeenJob, request: LogRequest) -> Iterator[str]:
    """Yield logs from the workspace, which keeps only those of training; logs of other stages are deleted with their pods."""
    stage = request.stage or Role.TRAIN
    attempts = [past.number for past in job.attempts_of(stage) if not request.failed or past.outcome is AttemptOutcome.FAILED]
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
    if request.since_seconds is not None:
        raise LocalError("--since: the logs that are kept on the workspace have no times; use --tail")
    folder = str(WorkspaceLayout(Path()).logs(stage, attempt))
    names = [folder] if request.rank is None else [f"{folder}/rank-{request.rank:05d}.log"]
    seen = False
    with closing(read_workspace(cluster, job, names, request.tail or 0)) as printed:
        for entry in printed:
            line, file = entry.get("line"), str(entry.get("file", ""))
            if isinstance(line, str):
                seen = True
                yield f"[{plain(file.rpartition('/')[2].removesuffix('.log'), 40)}] {harmless(line)}"
            elif entry.get("cut") is True:
                yield f"-- only the end of {plain(file or 'the log', 200)} is shown"
    if not seen:
        nodes = f"{ranks_per_node(job)} ranks per pod"
        raise ClusterError(f"{job.title}: the workspace holds no log of attempt {attempt} of {stage} ({folder}, {nodes})")

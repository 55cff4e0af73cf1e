"""Reads the logs of pods through the API server, of several at once if they are followed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence

from finetune_cli.cluster.errors import ClusterError
from finetune_cli.cluster.objects import Cluster, collection
from finetune_cli.jobs.seen import SeenPod
from finetune_operator.children.pod_template import CONTAINER_NAME

MOST_FOLLOWED = 64
"""Pods whose logs are followed at once, a connection each."""
_MOST_WAITING = 10_000
"""Lines that are read and not printed yet."""


def pod_lines(cluster: Cluster, namespace: str, pod: SeenPod, query: Mapping[str, str], *, follow: bool) -> Iterator[str]:
    """Lines of the log of one pod. Raises ClusterError."""
    path = f"{collection('v1', 'pods', namespace)}/{pod.name}/log"
    # Meshes and the like put containers of their own into pods.
    asked = {"container": CONTAINER_NAME, **query, **({"follow": "true"} if follow else {})}
    # A followed log is silent as long as its pod is.
    yield from cluster.lines(path, asked, None if follow else 30.0)


def followed_lines(
    cluster: Cluster, namespace: str, pods: Sequence[SeenPod], query: Mapping[str, str]
) -> Iterator[tuple[SeenPod, str]]:
    """Lines of all pods as they come, until all have ended. Raises ClusterError, for the first that cannot be read."""
    lines: queue.Queue[tuple[SeenPod, str | ClusterError | None]] = queue.Queue(_MOST_WAITING)

    def read(pod: SeenPod) -> None:
        try:
            for line in pod_lines(cluster, namespace, pod, query, follow=True):
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

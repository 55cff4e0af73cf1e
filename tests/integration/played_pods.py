"""What a kubelet does with the short-lived pods of commands, next to a real API server that has no nodes.

The API server admits the pod and is asked for its log or for a program in it, so it says whether the caller may. Those who may
get what the pod's own program prints of a folder of this machine.
"""

import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from finetune_cli.cluster.client import ClusterClient, RequestError
from tests.integration.kube import Document, Kube, RefusedError

LABEL = "finetune.dev/reader"


def printed(command: list[str], claims: Path) -> bytes:
    """What the program prints with this folder in place of the claims."""
    here = [part.replace("/claims/", f"{claims}/") for part in command[1:]]
    return subprocess.run([sys.executable, "-I", *here], capture_output=True, timeout=60, check=True).stdout


@contextmanager
def played_pods(
    kube: Kube, namespace: str, claims: Path, patch: pytest.MonkeyPatch, logs: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Play them in a namespace. logs: of other pods, by their names."""
    made: dict[str, Document] = {}
    ended = threading.Event()
    real_lines, real_output = ClusterClient.lines, ClusterClient.output_of

    def start_pods() -> None:
        while not ended.wait(0.02):
            for pod in kube.list("Pod", namespace, LABEL):
                name = pod["metadata"]["name"]
                if name not in made:
                    made[name] = pod
                    waits = "time.sleep" in str(pod["spec"]["containers"][0]["command"])
                    with suppress(RefusedError):  # deleted since
                        kube.patch("Pod", namespace, name, {"status": {"phase": "Running" if waits else "Succeeded"}}, "status")

    def lines(
        self: ClusterClient, path: str, query: Mapping[str, str] | None = None, silence_seconds: float | None = 30.0
    ) -> Iterator[str]:
        found = list(real_lines(self, path, query, silence_seconds))
        name = path.split("/")[-2]
        # Of a pod that no node has, the API server gives an empty log.
        text = (logs or {}).get(name, "")
        if name in made:
            text = printed(made[name]["spec"]["containers"][0]["command"], claims).decode()
        yield from found or text.splitlines()

    def output_of(
        self: ClusterClient, place: str, pod: str, container: str, command: list[str], silence_seconds: float = 30.0
    ) -> Iterator[bytes]:
        try:
            yield from real_output(self, place, pod, container, command, silence_seconds)
        except RequestError as error:
            if error.status != 400:
                raise
            yield printed(command, claims)

    patch.setattr(ClusterClient, "lines", lines)
    patch.setattr(ClusterClient, "output_of", output_of)
    patch.setattr("finetune_cli.cluster.short_lived_pod.SECONDS", 20)
    patch.setattr("finetune_cli.cluster.short_lived_pod._POLL_SECONDS", 0.05)
    player = threading.Thread(target=start_pods)
    player.start()
    try:
        yield
    finally:
        ended.set()
        player.join()

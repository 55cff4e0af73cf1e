"""A pod that mounts the claim with a job's results read-only, and the programs that run in it to read them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from finetune_cli.cluster.client import RequestError
from finetune_cli.cluster.errors import ClusterError, cluster_error
from finetune_cli.cluster.objects import Cluster, collection
from finetune_cli.cluster.reader_pod import CONTAINER, WorkspaceAccess, reader_pod, root_of
from finetune_cli.cluster.short_lived_pod import short_lived
from finetune_cli.jobs.plain import plain
from finetune_cli.jobs.seen import SeenJob

MOST_LISTED_BYTES = 16 << 20
"""Maximum length of the list of files."""
_SHOWN = 200
PART_BYTES = 8 << 20
"""Maximum bytes that one program sends: the client holds in memory what arrives faster than it is written to disk."""

LIST = """
import json, os, sys
root = sys.argv[1]
path = os.path.join(root, "SHA256SUMS")
sums = open(path).read(8 << 20) if os.path.isfile(path) and not os.path.islink(path) else None
sizes = {}
for line in (sums or "").splitlines():
    name = line[66:]
    if os.path.isfile(os.path.join(root, name)):
        sizes[name] = os.path.getsize(os.path.join(root, name))
print(json.dumps({"sums": sums, "sizes": sizes}))
"""
"""Prints SHA256SUMS and the sizes of the files that it names, as one line of JSON."""
SEND = """
import os, sys
root, name, offset, most = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
# A name on the claim must not lead out of it, nor to a pipe that never ends.
path = os.path.realpath(os.path.join(root, name))
if not path.startswith(os.path.realpath(root) + os.sep) or not os.path.isfile(path):
    sys.exit("is not a file of the results")
with open(path, "rb") as file:
    file.seek(offset)
    sys.stdout.buffer.write(file.read(most))
"""
"""Prints at most `most` bytes of a file, from an offset."""


class ResultsPod:
    """A running results pod."""

    def __init__(self, cluster: Cluster, namespace: str, name: str, root: str) -> None:
        self._cluster, self._namespace, self._name, self._root = cluster, namespace, name, root

    def listing(self) -> dict[str, Any]:
        """Return `sums`, the text of SHA256SUMS or None, and `sizes`, the bytes of each file named there. Raises ClusterError."""
        answer = b""
        for chunk in self._run(LIST):
            answer += chunk
            if len(answer) > MOST_LISTED_BYTES:
                break
        try:
            listing = json.loads(answer)
        except ValueError:
            listing = None
        if not isinstance(listing, dict):
            shown = plain(answer[:_SHOWN].decode(errors="replace"), _SHOWN)
            raise ClusterError(f"the pod {self._name} did not list the results ({shown})")
        return listing

    def content(self, name: str, offset: int) -> Iterator[bytes]:
        """Yield the bytes of a file, starting at `offset`. Raises ClusterError, also if the connection breaks."""
        received = PART_BYTES
        while received == PART_BYTES:
            received = 0
            for chunk in self._run(SEND, name, str(offset), str(PART_BYTES)):
                received += len(chunk)
                yield chunk
            offset += received

    def _run(self, program: str, *arguments: str) -> Iterator[bytes]:
        path = f"{collection('v1', 'pods', self._namespace)}/{self._name}/exec"
        command = ["python", "-c", program, self._root, *arguments]
        try:
            yield from self._cluster.client.output_of(self._namespace, self._name, CONTAINER, command)
        except RequestError as error:
            if error.status == 403:
                # The answer does not say which of the two permissions is missing. Before Kubernetes 1.35, `get` was enough.
                raise ClusterError(
                    f"you may not get and create pods/exec in the namespace {self._namespace}; ask for a Role with both "
                    "(docs/reference/rights.md lists what each command needs)",
                    status=403,
                ) from error
            raise cluster_error(error, "GET", path, self._cluster.client.server) from error


@contextmanager
def running_pod(cluster: Cluster, job: SeenJob, access: WorkspaceAccess, seconds: int) -> Iterator[ResultsPod]:
    """Create the pod, wait until it is running, and finally delete it. `seconds`: its maximum lifetime. Raises ClusterError."""
    # The pod only sleeps; programs are run in it with `exec`.
    command = ["python", "-c", f"import time; time.sleep({seconds})"]
    document = reader_pod(job, access.results, access.placement, command, seconds)
    with short_lived(cluster, document, job.namespace, "Running"):
        yield ResultsPod(cluster, job.namespace, document["metadata"]["name"], root_of(access.results))

"""A pod that holds the claim of a job's results for reading, and what is read of it by programs that run in it.

It has the image, user and placement of the job's own pods, mounts the claim for reading alone, and is deleted in any case. If
this machine dies meanwhile, the pod ends by itself and goes with its job.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from finetune_cli.cluster.client import RequestError
from finetune_cli.cluster.errors import ClusterError, cluster_error
from finetune_cli.cluster.objects import Cluster, collection
from finetune_cli.cluster.reader_pod import WorkspaceAccess, reader_pod, short_lived
from finetune_cli.jobs.plain import plain
from finetune_cli.jobs.seen import SeenJob
from finetune_job.names import CLAIMS_MOUNT

MOST_LISTED_BYTES = 16 << 20
"""Longest answer that lists the files."""
_SHOWN = 200
PART_BYTES = 8 << 20
"""Bytes that one program sends: the client keeps in memory what comes faster than it is written."""
CONTAINER = "reader"

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
"""Prints the list of the results and the sizes of what it names, as one line of JSON."""
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
"""Prints a part of a file."""


class ResultsPod:
    """A running results pod."""

    def __init__(self, cluster: Cluster, namespace: str, name: str, root: str) -> None:
        self._cluster, self._namespace, self._name, self._root = cluster, namespace, name, root

    def listing(self) -> dict[str, Any]:
        """`sums`: the text of SHA256SUMS, None if there is none; `sizes`: of the files that it names. Raises ClusterError."""
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
        """The bytes of a file from `offset` on. Raises ClusterError, also if the connection breaks off."""
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
            if error.status == 403:  # it does not say which of the two is missing; before Kubernetes 1.35 `get` was enough
                raise ClusterError(
                    f"you may not get and create pods/exec in the namespace {self._namespace}; ask for a Role with both rights "
                    "(docs/reference/rights.md lists what each command needs)",
                    status=403,
                ) from error
            raise cluster_error(error, "GET", path, self._cluster.client.server) from error


def results_pod(job: SeenJob, access: WorkspaceAccess, suffix: str, seconds: int) -> dict[str, Any]:
    """The pod as a document: it does nothing for so long, unless programs are run in it."""
    document = reader_pod(job, access, suffix, [], 0)
    document["spec"]["activeDeadlineSeconds"] = seconds
    document["spec"]["containers"][0]["command"] = ["python", "-c", f"import time; time.sleep({seconds})"]
    return document


@contextmanager
def running_pod(
    cluster: Cluster, job: SeenJob, access: WorkspaceAccess, seconds: int, pause: Callable[[float], None] = time.sleep
) -> Iterator[ResultsPod]:
    """Make it, wait until it runs, and delete it in the end. `seconds`: for all of it. Raises ClusterError."""
    document = results_pod(job, access, secrets.token_hex(4), seconds)
    with short_lived(cluster, document, job.namespace, "Running", pause):
        root = f"{CLAIMS_MOUNT}/{access.claim}/{access.path}".rstrip("/")
        yield ResultsPod(cluster, job.namespace, document["metadata"]["name"], root)

"""Reads jobs, their pods and events. Errors become messages; an optional object that cannot be read becomes `Unseen`."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from urllib.parse import quote

from finetune_cli.cluster.client import ClusterClient, RequestError
from finetune_cli.cluster.errors import ClusterError, cluster_error
from finetune_cli.exit_codes import ExitCode
from finetune_cli.jobs import documents
from finetune_cli.jobs.plain import plain
from finetune_cli.jobs.seen import SeenEvent, SeenJob, SeenPod, seen_event, seen_job, seen_pod
from finetune_job.names import API_VERSION, JOB_PLURAL, LABEL_JOB_UID

_PAGE = "500"
"""Maximum number of objects in one answer."""
_MOST_PAGES = 200
_MOST_NEAR = 3
_MOST_NAMED = 10
_T = TypeVar("_T")


@dataclass(frozen=True)
class Unseen:
    """Something that could not be read."""

    reason: str


class Cluster:
    """The cluster and the namespace that a command works in. Raises LocalError without a usable kubeconfig."""

    context: str | None = None
    """Context of the kubeconfig as the user named it."""

    def __init__(self, context: str | None = None, namespace: str | None = None) -> None:
        self.client, self.context = ClusterClient(context), context
        self.namespace = namespace or self.client.namespace

    def jobs(self, *, everywhere: bool = False, selector: str = "") -> list[SeenJob]:
        """List the jobs of the namespace, or of all namespaces, by namespace and name. Raises ClusterError."""
        listed = self.list(API_VERSION, JOB_PLURAL, "" if everywhere else self.namespace, selector)
        return sorted(map(self.seen, listed), key=lambda job: (job.namespace, job.name))

    def job(self, name: str) -> SeenJob:
        """Get a job of the namespace. Raises ClusterError, with the exit code UNUSABLE if there is no such job."""
        document = self.get(API_VERSION, JOB_PLURAL, name)
        if document is not None:
            return self.seen(document)
        # Suggest names of existing jobs, if the user may list them.
        names = unless_refused(lambda: [job.name for job in self.jobs()])
        if isinstance(names, Unseen):
            hint = "name another with -n"
        elif not names:
            hint = "the namespace has none; name another with -n"
        else:
            near = difflib.get_close_matches(name, names, n=_MOST_NEAR)
            shown = ", ".join(near or names[:_MOST_NAMED])
            hint = f"did you mean {shown}?" if near else f"there are {shown}" + (", ..." if len(names) > _MOST_NAMED else "")
        message = f"there is no FineTuneJob {plain(name, 80)} in the namespace {self.namespace}; {hint}"
        raise ClusterError(message, ExitCode.UNUSABLE, 404)

    def seen(self, document: Mapping[str, Any]) -> SeenJob:
        """Parse the document of a job, and record this cluster's context in the result."""
        return replace(seen_job(document), context=self.context)

    def pods_of(self, job: SeenJob) -> list[SeenPod]:
        """List the job's existing pods, sorted by time of creation, node rank and name. Raises ClusterError."""
        pods = map(seen_pod, self.list("v1", "pods", job.namespace, f"{LABEL_JOB_UID}={job.uid}"))
        return sorted(pods, key=lambda pod: (pod.created is not None and pod.created.timestamp(), pod.node_rank, pod.name))

    def events_of(self, job: SeenJob, pods: list[SeenPod]) -> list[SeenEvent]:
        """List the events of the job, its Jobs and its pods, oldest first. Raises ClusterError."""
        uids = {job.uid, *(pod.uid for pod in pods)}
        events = []
        for event in self.list("v1", "events", job.namespace):
            involved = documents.part(event, "involvedObject")
            is_of_child = documents.text(involved, "kind") == "Job" and documents.text(involved, "name") in job.batch_jobs
            if is_of_child or documents.text(involved, "uid") in uids:
                events.append(seen_event(event))
        return sorted(events, key=lambda event: event.time.timestamp() if event.time is not None else 0.0)

    def get(self, version: str, plural: str, name: str, namespace: str | None = None) -> dict[str, Any] | None:
        """Get an object; None if it does not exist. `namespace` is empty for a cluster-scoped object. Raises ClusterError."""
        place = self.namespace if namespace is None else namespace
        path = f"{collection(version, plural, place)}/{quote(name, safe='')}"
        try:
            return self.client.request("GET", path)
        except RequestError as error:
            if error.status == 404 and error.details.get("name"):
                return None
            raise cluster_error(error, "GET", path, self.client.server) from error

    def list(self, version: str, plural: str, namespace: str, selector: str = "") -> list[Mapping[str, Any]]:
        """List the objects of a namespace; an empty one means all namespaces, or cluster-scoped objects. Raises ClusterError."""
        path, query, more = collection(version, plural, namespace), {"labelSelector": selector} if selector else {}, ""
        objects: list[Mapping[str, Any]] = []
        for _ in range(_MOST_PAGES):
            page = {**query, "limit": _PAGE, **({"continue": more} if more else {})}
            answer = self.send("GET", path, None, query=page)
            objects += documents.elements(answer, "items")
            more = documents.text(answer, "metadata", "continue")
            if not more:
                break
        return objects

    def within(self, namespace: str) -> Cluster:
        """Return the same cluster with another namespace."""
        other = copy.copy(self)
        other.namespace = namespace
        return other

    def send(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        content_type: str = "application/json",
        query: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Send one request. Raises ClusterError."""
        try:
            return self.client.request(method, path, body, query, content_type)
        except RequestError as error:
            raise cluster_error(error, method, path, self.client.server) from error

    def lines(self, path: str, query: Mapping[str, str], silence_seconds: float | None) -> Iterator[str]:
        """Yield the lines of a log. Raises ClusterError."""
        try:
            yield from self.client.lines(path, query, silence_seconds)
        except RequestError as error:
            raise cluster_error(error, "GET", path, self.client.server) from error


def collection(version: str, plural: str, namespace: str) -> str:
    """Return the path of a collection. `version`: `v1` or `group/version`. `namespace`: empty for all, or if cluster-scoped."""
    root = f"/api/{version}" if version == "v1" else f"/apis/{version}"
    place = f"/namespaces/{quote(namespace, safe='')}" if namespace else ""
    return f"{root}{place}/{plural}"


def unless_refused(read: Callable[[], _T]) -> _T | Unseen:
    """Return what `read` returns, or why it could not be read."""
    try:
        return read()
    except ClusterError as error:
        return Unseen(str(error))

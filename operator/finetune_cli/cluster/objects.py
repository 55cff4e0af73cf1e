"""Reads jobs and what belongs to them. Errors are told in words; what is only nice to have becomes an `Unseen` instead."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from finetune_cli.cluster.client import ClusterClient, RequestError
from finetune_cli.cluster.errors import ClusterError, cluster_error
from finetune_cli.exit_codes import ExitCode
from finetune_cli.jobs import documents
from finetune_cli.jobs.plain import plain
from finetune_cli.jobs.seen import SeenEvent, SeenJob, SeenPod, seen_event, seen_job, seen_pod
from finetune_job.names import API_VERSION, JOB_PLURAL, LABEL_JOB_UID, PROFILE_PLURAL

if TYPE_CHECKING:
    from finetune_job.api.profile import FineTuneProfileSpec

_PAGE = "500"
"""Objects of one answer."""
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
        """Jobs of the namespace or of all, in the order of namespaces and names. Raises ClusterError."""
        path = collection(API_VERSION, JOB_PLURAL, "" if everywhere else self.namespace)
        found = map(self.seen, self._list(path, {"labelSelector": selector} if selector else {}))
        return sorted(found, key=lambda job: (job.namespace, job.name))

    def job(self, name: str) -> SeenJob:
        """A job of the namespace. Raises ClusterError; its exit code is UNUSABLE if there is no such job."""
        path = f"{collection(API_VERSION, JOB_PLURAL, self.namespace)}/{quote(name, safe='')}"
        try:
            return self.seen(self.client.request("GET", path))
        except RequestError as error:
            if error.status == 404 and error.details.get("name"):
                raise self._no_job(name) from error
            raise cluster_error(error, "GET", path, self.client.server) from error

    def seen(self, document: Mapping[str, Any]) -> SeenJob:
        """A job of this cluster."""
        return replace(seen_job(document), context=self.context)

    def pods_of(self, job: SeenJob) -> list[SeenPod]:
        """List the job's pods that exist, by role, attempt and place in the gang. Raises ClusterError."""
        path = collection("v1", "pods", job.namespace)
        found = map(seen_pod, self._list(path, {"labelSelector": f"{LABEL_JOB_UID}={job.uid}"}))
        return sorted(found, key=lambda pod: (pod.created is not None and pod.created.timestamp(), pod.node_rank, pod.name))

    def events_of(self, job: SeenJob, pods: list[SeenPod]) -> list[SeenEvent]:
        """Events of the job, its Jobs and its pods, oldest first. Raises ClusterError."""
        path = collection("v1", "events", job.namespace)
        uids = {job.uid, *(pod.uid for pod in pods)}
        found = []
        for each in self._list(path, {}):
            involved = documents.part(each, "involvedObject")
            is_of_child = documents.text(involved, "kind") == "Job" and documents.text(involved, "name") in job.batch_jobs
            if is_of_child or documents.text(involved, "uid") in uids:
                found.append(seen_event(each))
        return sorted(found, key=lambda event: event.time.timestamp() if event.time is not None else 0.0)

    def profile(self, name: str) -> FineTuneProfileSpec | None:
        """Get a profile; None if there is none of this name. Raises ClusterError."""
        from finetune_job.api.profile import FineTuneProfileSpec

        document = self.get(API_VERSION, PROFILE_PLURAL, name, "")
        try:
            return None if document is None else FineTuneProfileSpec.model_validate(document.get("spec"))
        except ValueError as error:
            raise ClusterError(f"the FineTuneProfile {name} is not one that this release of `finetune` knows") from error

    def get(self, version: str, plural: str, name: str, namespace: str | None = None) -> dict[str, Any] | None:
        """An object of the namespace, of another one, or (empty) of the cluster; None: there is none. Raises ClusterError."""
        place = self.namespace if namespace is None else namespace
        path = f"{collection(version, plural, place)}/{quote(name, safe='')}"
        try:
            return self.client.request("GET", path)
        except RequestError as error:
            if error.status == 404 and error.details.get("name"):
                return None
            raise cluster_error(error, "GET", path, self.client.server) from error

    def list(self, version: str, plural: str, namespace: str, selector: str = "") -> list[Mapping[str, Any]]:
        """Objects of a namespace, or (empty) of all or of the cluster. Raises ClusterError."""
        return list(self._list(collection(version, plural, namespace), {"labelSelector": selector} if selector else {}))

    def within(self, namespace: str) -> Cluster:
        """Return the same cluster with another namespace."""
        other = copy.copy(self)
        other.namespace = namespace
        return other

    def send(
        self,
        method: str,
        path: str,
        body: dict[str, Any],
        content_type: str = "application/json",
        query: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Change something. Raises ClusterError."""
        try:
            return self.client.request(method, path, body, query, content_type)
        except RequestError as error:
            raise cluster_error(error, method, path, self.client.server) from error

    def lines(self, path: str, query: Mapping[str, str], silence_seconds: float | None) -> Iterator[str]:
        """Lines of a log. Raises ClusterError."""
        try:
            yield from self.client.lines(path, query, silence_seconds)
        except RequestError as error:
            raise cluster_error(error, "GET", path, self.client.server) from error

    def _list(self, path: str, query: Mapping[str, str]) -> Iterator[Mapping[str, Any]]:
        more = ""
        for _ in range(_MOST_PAGES):
            try:
                answer = self.client.request("GET", path, query={**query, "limit": _PAGE, **({"continue": more} if more else {})})
            except RequestError as error:
                raise cluster_error(error, "GET", path, self.client.server) from error
            yield from documents.elements(answer, "items")
            more = documents.text(answer, "metadata", "continue")
            if not more:
                return

    def _no_job(self, name: str) -> ClusterError:
        """An error that suggests names of existing jobs, as far as they may be listed."""
        message = f"there is no FineTuneJob {plain(name, 80)} in the namespace {self.namespace}"
        names = unless_refused(lambda: [job.name for job in self.jobs()])
        if isinstance(names, Unseen):
            hint = "name another with -n"
        elif not names:
            hint = "the namespace has none; name another with -n"
        else:
            near = difflib.get_close_matches(name, names, n=_MOST_NEAR)
            shown = ", ".join(near or names[:_MOST_NAMED])
            hint = f"did you mean {shown}?" if near else f"there are {shown}" + (", ..." if len(names) > _MOST_NAMED else "")
        return ClusterError(f"{message}; {hint}", ExitCode.UNUSABLE, 404)


def collection(version: str, plural: str, namespace: str) -> str:
    """Path of a collection: `version` is `v1` or `group/version`; an empty namespace stands for all, or for the cluster."""
    root = f"/api/{version}" if version == "v1" else f"/apis/{version}"
    place = f"/namespaces/{quote(namespace, safe='')}" if namespace else ""
    return f"{root}{place}/{plural}"


def unless_refused(read: Callable[[], _T]) -> _T | Unseen:
    """Return what `read` returns, or why it could not be read."""
    try:
        return read()
    except ClusterError as error:
        return Unseen(str(error))

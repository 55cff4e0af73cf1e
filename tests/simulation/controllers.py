"""The parts of kube-controller-manager that a FineTuneJob lives with: Job controller, garbage collector, namespace controller."""

from dataclasses import dataclass
from typing import Any

from finetune_operator.client.kinds import BATCH_JOBS, EVENTS, JOBS, PODS, SERVICES
from tests.simulation.api_server import FOREGROUND, KINDS, ORPHAN, ApiServer, Document, RefusedError, owned_by
from tests.simulation.virtual_time import stamp

TRACKING = "batch.kubernetes.io/job-tracking"
INDEX = "batch.kubernetes.io/job-completion-index"


def is_true(document: Document, condition: str) -> bool:
    """Whether a condition of the status is True."""
    return any(item["type"] == condition and item["status"] == "True" for item in condition_list(document))


def condition_list(document: Document) -> list[Document]:
    return (document.get("status") or {}).get("conditions") or []


def phase_of(pod: Document) -> str:
    return str((pod.get("status") or {}).get("phase") or "Pending")


def is_over(pod: Document) -> bool:
    """Whether no container of the pod can run any more, as the API says."""
    return phase_of(pod) in ("Succeeded", "Failed")


@dataclass
class JobController:
    """Indexed and plain Jobs with `backoffLimit: 0`, `restartPolicy: Never` and `podReplacementPolicy: Failed`."""

    server: ApiServer

    def release_orphans(self) -> None:
        """Pods whose Job is gone are held by nobody."""
        for pod in self.server.all(PODS):
            owners = pod["metadata"].get("ownerReferences") or ()
            if not any(self.server.by_uid(BATCH_JOBS, owner["uid"]) for owner in owners):
                self._release(pod)

    def sync(self, job: Document) -> None:
        """One look at one Job."""
        pods = owned_by(self.server.all(PODS, job["metadata"]["namespace"]), job["metadata"]["uid"])
        for pod in pods:
            if is_over(pod) or "deletionTimestamp" in job["metadata"] or is_true(job, "Complete") or is_true(job, "Failed"):
                self._release(pod)
        if "deletionTimestamp" in job["metadata"] or is_true(job, "Complete") or is_true(job, "Failed"):
            return
        failed = [pod for pod in pods if phase_of(pod) == "Failed"]
        ended = is_true(job, "FailureTarget") or is_true(job, "SuccessCriteriaMet")
        if not ended and job["spec"].get("suspend"):
            self._suspend(job, pods)
            return
        if not ended and not (job.get("status") or {}).get("startTime"):
            job = self._set(job, {"Suspended": ("False", "JobResumed", "Job resumed")}, startTime=stamp(self.server.now()))
        # Pods that a suspension ended belong to the past.
        failed = [pod for pod in failed if not pod["metadata"].get("annotations", {}).get("simulation/suspended")]
        if failed and not ended:
            disrupted = [pod for pod in failed if is_true(pod, "DisruptionTarget")]
            reason = "PodFailurePolicy" if disrupted else "BackoffLimitExceeded"
            job = self._set(job, {"FailureTarget": ("True", reason, f"{reason} (simulated)")})
        if is_true(job, "FailureTarget"):
            for pod in pods:
                if not is_over(pod) and "deletionTimestamp" not in pod["metadata"]:
                    self._delete(pod)
            left = owned_by(self.server.all(PODS), job["metadata"]["uid"])
            if all(is_over(pod) for pod in left):
                reason = next(item["reason"] for item in condition_list(job) if item["type"] == "FailureTarget")
                self._set(job, {"Failed": ("True", reason, f"{reason} (simulated)")})
            return
        succeeded = {_index(pod) for pod in pods if phase_of(pod) == "Succeeded"}
        succeeded |= set((job.get("status") or {}).get("succeededIndexes") or ())
        if len(succeeded) >= job["spec"]["completions"] or is_true(job, "SuccessCriteriaMet"):
            if not is_true(job, "SuccessCriteriaMet"):
                self._set(job, {"SuccessCriteriaMet": ("True", "CompletionsReached", "")}, succeededIndexes=sorted(succeeded))
            else:
                self._set(job, {"Complete": ("True", "CompletionsReached", "")})
            return
        if succeeded:
            job = self._set(job, {}, succeededIndexes=sorted(succeeded))
        present = {_index(pod) for pod in pods if phase_of(pod) != "Failed"}
        for index in range(job["spec"]["completions"]):
            if index not in present | succeeded and not self._start(job, index):
                return

    def _suspend(self, job: Document, pods: list[Document]) -> None:
        for pod in pods:
            if not is_over(pod):

                def mark(item: Document) -> None:
                    item["metadata"].setdefault("annotations", {})["simulation/suspended"] = "true"

                self._delete(self.server.update(PODS, pod, mark))
        self._set(job, {"Suspended": ("True", "JobSuspended", "Job suspended")}, startTime=None)

    def _start(self, job: Document, index: int) -> bool:
        template = job["spec"]["template"]
        metadata = job["metadata"]
        name = f"{metadata['name']}-{index}-{self.server.random.randrange(16**5):05x}"
        labels = dict(template["metadata"].get("labels") or {})
        labels |= {"batch.kubernetes.io/job-name": metadata["name"], "batch.kubernetes.io/controller-uid": metadata["uid"]}
        annotations = dict(template["metadata"].get("annotations") or {})
        if job["spec"].get("completionMode") == "Indexed":
            labels[INDEX] = annotations[INDEX] = str(index)
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": metadata["name"], "uid": metadata["uid"]}
        body = {
            "metadata": {
                "name": name,
                "labels": labels,
                "annotations": annotations,
                "finalizers": [TRACKING],
                "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": True}],
            },
            "spec": template["spec"],
            "status": {"phase": "Pending"},
        }
        try:
            self.server.create(PODS, metadata["namespace"], body)
        except RefusedError as refusal:
            self._warn(job, "FailedCreate", f"Error creating: {refusal.message}")
            return False
        return True

    def _warn(self, job: Document, reason: str, message: str) -> None:
        warn(self.server, "Job", job, reason, message)

    def _delete(self, pod: Document) -> None:
        self.server.delete(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"], uid=pod["metadata"]["uid"])

    def _release(self, pod: Document) -> None:
        if TRACKING in (pod["metadata"].get("finalizers") or ()):
            self.server.drop_finalizer(PODS, pod, TRACKING)

    def _set(self, job: Document, conditions: dict[str, tuple[str, str, str]], **fields: Any) -> Document:
        def change(item: Document) -> None:
            status = item.setdefault("status", {})
            kept = {one["type"]: one for one in status.get("conditions") or ()}
            for kind, (state, reason, message) in conditions.items():
                if kind in kept and kept[kind]["status"] == state:
                    continue
                if state == "False" and kind not in kept:
                    continue
                kept[kind] = {
                    "type": kind,
                    "status": state,
                    "reason": reason,
                    "message": message,
                    "lastTransitionTime": stamp(self.server.now()),
                }
            if kept:
                status["conditions"] = list(kept.values())
            for name, value in fields.items():
                if value is None:
                    status.pop(name, None)
                else:
                    status[name] = value

        return self.server.update(BATCH_JOBS, job, change)


def _index(pod: Document) -> int:
    return int((pod["metadata"].get("annotations") or {}).get(INDEX, "0"))


def warn(server: ApiServer, kind: str, about: Document, reason: str, message: str) -> None:
    """A Warning event about an object; the same again raises its count."""
    metadata = about["metadata"]
    name = f"{metadata['name']}.{reason.lower()}"
    known = server.get(EVENTS, metadata["namespace"], name)
    now = stamp(server.now())
    if known is not None:
        server.update(EVENTS, known, lambda item: item.update(count=item["count"] + 1, lastTimestamp=now))
        return
    involved = {"kind": kind, "namespace": metadata["namespace"], "name": metadata["name"], "uid": metadata["uid"]}
    body = {
        "metadata": {"name": name},
        "involvedObject": involved,
        "type": "Warning",
        "reason": reason,
        "message": message,
        "count": 1,
        "firstTimestamp": now,
        "lastTimestamp": now,
    }
    try:
        server.create(EVENTS, metadata["namespace"], body)
    except RefusedError:
        return


@dataclass
class GarbageCollector:
    """Foreground, background and orphan deletion by owner references."""

    server: ApiServer

    def sync(self) -> None:
        """One round over everything."""
        for kind in (JOBS, BATCH_JOBS):
            for item in self.server.all(kind):
                finalizers = item["metadata"].get("finalizers") or ()
                if FOREGROUND in finalizers:
                    self._delete_dependents(kind, item)
                elif ORPHAN in finalizers:
                    self._orphan(kind, item)
        for kind in (PODS, SERVICES):
            for item in self.server.all(kind):
                if FOREGROUND in (item["metadata"].get("finalizers") or ()):
                    self.server.drop_finalizer(kind, item, FOREGROUND)
        for kind in KINDS:
            for item in self.server.all(kind):
                owners = item["metadata"].get("ownerReferences") or ()
                if kind != EVENTS and FOREGROUND in (item["metadata"].get("finalizers") or ()) and kind not in (JOBS, BATCH_JOBS):
                    self.server.drop_finalizer(kind, item, FOREGROUND)
                elif owners and not any(self.server.exists(owner["uid"]) for owner in owners):
                    self._delete(kind, item, "Background")

    def _delete_dependents(self, kind: Any, owner: Document) -> None:
        dependents = self.server.dependents(owner["metadata"]["uid"])
        for dependent_kind, item in dependents:
            if "deletionTimestamp" not in item["metadata"]:
                self._delete(dependent_kind, item, "Foreground")
        if not self.server.dependents(owner["metadata"]["uid"]):
            self.server.drop_finalizer(kind, owner, FOREGROUND)

    def _orphan(self, kind: Any, owner: Document) -> None:
        uid = owner["metadata"]["uid"]
        for dependent_kind, item in self.server.dependents(uid):

            def release(changed: Document) -> None:
                kept = [one for one in changed["metadata"]["ownerReferences"] if one["uid"] != uid]
                changed["metadata"]["ownerReferences"] = kept

            self.server.update(dependent_kind, item, release)
        self.server.drop_finalizer(kind, owner, ORPHAN)

    def _delete(self, kind: Any, item: Document, policy: str) -> None:
        metadata = item["metadata"]
        if "deletionTimestamp" in metadata and kind != PODS:
            return
        self.server.delete(kind, metadata.get("namespace", ""), metadata["name"], uid=metadata["uid"], policy=policy)


def end_namespace_step(server: ApiServer, namespace: str) -> None:
    """One round of the namespace controller: one kind of objects, drawn at random, is deleted; an empty namespace goes."""
    kinds = [kind for kind in KINDS if kind.namespaced and server.all(kind, namespace)]
    if not kinds:
        server.terminating.discard(namespace)
        server.removed_namespaces.add(namespace)
        return
    kind = server.random.choice(kinds)
    for item in server.all(kind, namespace):
        metadata = item["metadata"]
        if "deletionTimestamp" not in metadata or kind == PODS:
            server.delete(kind, namespace, metadata["name"], uid=metadata["uid"], policy="Background")

"""What a test does to a namespace: claims, jobs, and pod outcomes as a kubelet would report them."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from finetune_job.failures import EXIT_CODES, FailureClass, Outcome, TerminationReport
from finetune_job.names import LABEL_ATTEMPT, LABEL_JOB, LABEL_ROLE, Role
from tests.integration.kube import Document, Kube, RefusedError
from tools.cluster.errors import wait_until

DEADLINE = 120.0
"""Seconds; far more than anything takes on an idle machine."""
CLAIMS = ("models", "data", "results", "workspace")
SPEC: Document = {
    "model": {"source": "pvc://models/base"},
    "data": {"source": "pvc://data/train.jsonl"},
    "training": {"maxSteps": 4, "globalBatchSize": 4},
    "workspace": {"claimName": "workspace"},
    "output": {"destination": "pvc://results/tuned"},
}
INDEX = "batch.kubernetes.io/job-completion-index"


def _job(name: str, changes: dict[str, Any]) -> Document:
    spec = copy.deepcopy(SPEC) | changes
    return {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": {"name": name}, "spec": spec}


@dataclass(frozen=True)
class Workload:
    """One namespace, seen by an administrator and by its kubelets."""

    kube: Kube
    namespace: str

    def make_claims(self, *names: str) -> None:
        """Create claims; whether they are bound is no concern of the operator."""
        for name in names or CLAIMS:
            spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
            self.kube.create("PersistentVolumeClaim", self.namespace, {"metadata": {"name": name}, "spec": spec})

    def apply(self, name: str = "tune", **changes: Any) -> Document:
        """Create a FineTuneJob; `changes` replace parts of its spec."""
        return self.kube.create("FineTuneJob", self.namespace, _job(name, changes))

    def apply_leniently(self, name: str = "tune", **changes: Any) -> Document:
        """As a client does that does not ask for field validation: unknown fields are pruned without a word."""
        return self.kube.create("FineTuneJob", self.namespace, _job(name, changes), validation="Ignore")

    @contextmanager
    def profile(self, name: str, **spec: Any) -> Iterator[None]:
        """Create a FineTuneProfile, which is deleted at the end."""
        kind = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneProfile", "metadata": {"name": name}}
        self.kube.create("FineTuneProfile", "", {**kind, "spec": {"trainerImage": "registry.test/trainer:1", **spec}})
        try:
            yield
        finally:
            self.kube.delete("FineTuneProfile", "", name)

    def default_profile(self) -> dict[str, Any]:
        """The spec of the profile that the chart made."""
        profile = self.kube.get("FineTuneProfile", "", "default")
        assert profile is not None
        spec: dict[str, Any] = profile["spec"]
        return spec

    def job(self, name: str = "tune") -> Document:
        """The FineTuneJob."""
        found = self.kube.get("FineTuneJob", self.namespace, name)
        assert found is not None
        return found

    def status(self, name: str = "tune") -> Document:
        """Its status."""
        found: Document = self.job(name).get("status") or {}
        return found

    def condition(self, kind: str, name: str = "tune") -> Document:
        """One of its conditions, empty while absent."""
        return next((item for item in self.status(name).get("conditions", ()) if item["type"] == kind), {})

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait for a condition; what the cluster looked like then is part of the failure."""
        try:
            return wait_until(condition, what, DEADLINE)
        except Exception as error:
            error.add_note(self.describe())
            raise

    def wait_for(self, kind: str, status: str = "True", reason: str = "", name: str = "tune") -> Document:
        """Wait for a condition of the FineTuneJob."""

        def reached() -> Document | None:
            found = self.condition(kind, name)
            good = found.get("status") == status and reason in ("", found.get("reason"))
            return found if good else None

        found: Document = self.wait(reached, f"{kind}={status}/{reason or '*'} of {name}")
        return found

    def batch_jobs(self, role: Role, name: str = "tune") -> list[Document]:
        """Batch Jobs of a role."""
        return self.kube.list("Job", self.namespace, f"{LABEL_JOB}={name},{LABEL_ROLE}={role}")

    def attempts(self, role: Role, name: str = "tune") -> list[Document]:
        """The recorded attempts of a role."""
        return [attempt for attempt in self.status(name).get("attempts", ()) if attempt["role"] == role]

    def pods(self, role: Role, attempt: int = 0, name: str = "tune") -> list[Document]:
        """Pods of a role and attempt by completion index, without those that are being deleted."""
        found = self.kube.list("Pod", self.namespace, f"{LABEL_JOB}={name},{LABEL_ROLE}={role},{LABEL_ATTEMPT}={attempt}")
        living = [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]
        return sorted(living, key=lambda pod: int(pod["metadata"].get("labels", {}).get(INDEX, 0)))

    def wait_for_pods(self, role: Role, attempt: int = 0, *, number: int = 1, name: str = "tune") -> list[Document]:
        """Wait until the Job controller has made the pods."""

        def made() -> list[Document] | None:
            found = self.pods(role, attempt, name)
            return found if len(found) == number else None

        found: list[Document] = self.wait(made, f"{number} pods of {role} attempt {attempt}")
        return found

    def set_running(self, pod: Document, address: str = "10.0.0.1") -> None:
        """The kubelet started the container."""
        state = {"running": {"startedAt": _now()}}
        self._report(pod, "Running", state, podIP=address, podIPs=[{"ip": address}], ready=True)

    def set_ended(self, pod: Document, report: TerminationReport | None, exit_code: int | None = None) -> None:
        """The container ended with a report (None: without a word)."""
        if exit_code is None:
            exit_code = 0 if report is None or report.failure is None else EXIT_CODES[report.failure]
        state = {
            "terminated": {
                "exitCode": exit_code,
                "reason": "Error" if exit_code else "Completed",
                "startedAt": _now(),
                "finishedAt": _now(),
                "message": report.envelope() if report is not None else "",
            }
        }
        self._report(pod, "Failed" if exit_code else "Succeeded", state)

    def succeed(self, role: Role, attempt: int = 0, *, nodes: int = 1, name: str = "tune", **facts: str) -> None:
        """All pods of a role run and then end well."""
        for pod in self.wait_for_pods(role, attempt, number=nodes, name=name):
            self.set_running(pod)
            self.set_ended(pod, TerminationReport(role=role, attempt=attempt, outcome=Outcome.SUCCEEDED, facts=facts))

    def fail(self, pod: Document, failure: FailureClass, message: str, attempt: int = 0, rank: int = 0) -> None:
        """A training pod fails with a report."""
        report = TerminationReport(
            role=Role.TRAIN,
            attempt=attempt,
            outcome=Outcome.FAILED,
            failure=failure,
            message=message,
            rank=rank,
            node_rank=rank,
            step=2,
            time=datetime.now(UTC).timestamp(),
        )
        self.set_ended(pod, report)

    def describe(self) -> str:
        """What a person would look at."""
        lines = []
        for kind in ("FineTuneJob", "Job", "Pod", "Event"):
            for item in self.kube.list(kind, self.namespace):
                status = item.get("status") or f"{item.get('reason')}: {item.get('message')}"
                lines.append(f"{kind} {item['metadata']['name']}: {status}")
        return "\n".join(lines)

    def _report(self, pod: Document, phase: str, state: Document, *, ready: bool = False, **more: Any) -> None:
        container = pod["spec"]["containers"][0]
        entry = {
            "name": container["name"],
            "image": container["image"],
            "imageID": "",
            "ready": ready,
            "restartCount": 0,
            "state": state,
        }
        conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
        conditions += [
            {"type": kind, "status": "True", "lastTransitionTime": _now()}
            for kind in ("PodScheduled", "PodReadyToStartContainers")
        ]
        status = {"phase": phase, "conditions": conditions, "containerStatuses": [entry], **more}
        try:
            self.kube.patch("Pod", self.namespace, pod["metadata"]["name"], {"status": status}, "status")
        except RefusedError as refusal:
            if refusal.code != 404:  # the Job controller deletes the others when one rank fails
                raise


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")

"""Kueue's documented part, played against the real Job controller: tests of the traps that it sets for the owner of a Job.

Here the test is Kueue: it suspends Jobs and lets them go, puts node selectors and tolerations into them, and keeps a Workload for
each. https://kueue.sigs.k8s.io/docs/reference/labels-and-annotations/
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest

from finetune_job.failures import FailureClass
from finetune_job.names import Role
from tests.integration.conftest import RELEASE, SYSTEM, Installed, OperatorFactory
from tests.integration.kube import Document, RefusedError
from tests.integration.workload import Workload

GATES = "kueue.x-k8s.io/admission-gated-by"
QUEUE, PRIORITY = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
NAME = "workloads.kueue.x-k8s.io"
FREE_FORM = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
DEFINITION: Document = {
    "metadata": {"name": NAME},
    "spec": {
        "group": "kueue.x-k8s.io",
        "scope": "Namespaced",
        "names": {"kind": "Workload", "listKind": "WorkloadList", "plural": "workloads", "singular": "workload"},
        "versions": [
            {
                "name": "v1beta2",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": FREE_FORM, "status": FREE_FORM}}},
            }
        ],
    },
}


@pytest.fixture(scope="module", autouse=True)
def workloads(installed: Installed) -> Iterator[None]:
    """Workloads can be kept, as where Kueue is installed; their definition is gone again for the other tests."""
    try:
        installed.kube.create("CustomResourceDefinition", "", DEFINITION)
    except RefusedError as refusal:
        if refusal.code != 409:
            raise
    installed.cluster.kubectl("wait", "--for=condition=Established", f"crd/{NAME}", "--timeout=60s")
    yield
    installed.kube.delete("CustomResourceDefinition", "", NAME)


@dataclass(frozen=True)
class Kueue:
    """The queue of one namespace."""

    workload: Workload

    def job(self, role: Role, attempt: int = 0) -> Document:
        """The Job of a role and attempt, once it is there."""
        name = f"tune-{role}-{attempt}"
        found: Document = self.workload.wait(lambda: self.workload.kube.get("Job", self.workload.namespace, name), f"Job {name}")
        return found

    def hold(self, role: Role, attempt: int = 0, *, labels: dict[str, str] | None = None) -> Document:
        """Suspend a Job, as the webhook does at its creation and the controller with one that runs without admission."""
        job = self.job(role, attempt)
        return self._patch(job, {"metadata": {"labels": labels or {}}, "spec": {"suspend": True}})

    def admit(self, role: Role, attempt: int = 0, **flavor: Any) -> Document:
        """Let a Job go, with what its flavor says of nodes."""
        job = self.job(role, attempt)
        if flavor:
            self._patch(job, {"spec": {"template": {"spec": flavor}}})
        return self._patch(job, {"spec": {"suspend": False}})

    def says(self, role: Role, attempt: int, reason: str, message: str, evicted: str = "") -> None:
        """Keep a Workload for the Job."""
        job = self.job(role, attempt)
        conditions = [{"type": "QuotaReserved", "status": "False", "reason": reason, "message": message}]
        if evicted:
            conditions.append({"type": "Evicted", "status": "True", "reason": evicted, "message": "by its queue"})
        body = {
            "apiVersion": "kueue.x-k8s.io/v1beta2",
            "kind": "Workload",
            "metadata": {"name": f"job-{job['metadata']['name']}", "labels": {"kueue.x-k8s.io/job-uid": job["metadata"]["uid"]}},
            "spec": {"queueName": "gpus", "active": True},
            "status": {"conditions": conditions},
        }
        kube, namespace = self.workload.kube, self.workload.namespace
        if kube.get("Workload", namespace, body["metadata"]["name"]) is None:
            kube.create("Workload", namespace, body)
        else:
            kube.patch("Workload", namespace, body["metadata"]["name"], {"status": body["status"]})

    def _patch(self, job: Document, patch: Document) -> Document:
        return self.workload.kube.patch("Job", self.workload.namespace, job["metadata"]["name"], patch)


@pytest.fixture
def kueue(workload: Workload) -> Kueue:
    return Kueue(workload)


def queued(workload: Workload, condition: str, words: str) -> Document:
    """Wait until a stage is Queued with these words of the queue."""

    def told() -> Document | None:
        found = workload.condition(condition)
        return found if found.get("reason") == "Queued" and words in found.get("message", "") else None

    found: Document = workload.wait(told, f"{condition} to be Queued: {words}")
    return found


def test_a_default_queue_that_takes_every_job_of_the_namespace_is_waited_for(
    workload: Workload, operator: OperatorFactory, kueue: Kueue
) -> None:
    """Trap 1: a LocalQueue named `default` labels preflight, merge and publish as well."""
    workload.apply()
    operator()
    kueue.hold(Role.PREFLIGHT, labels={QUEUE: "default"})
    queued(workload, "Prepared", "queue holds the Job back")
    kueue.admit(Role.PREFLIGHT)
    workload.succeed(Role.PREFLIGHT)
    workload.succeed(Role.TRAIN)
    kueue.hold(Role.MERGE, labels={QUEUE: "default"})
    queued(workload, "Merged", "queue holds the Job back")
    kueue.admit(Role.MERGE)
    workload.succeed(Role.MERGE)
    workload.wait_for("Succeeded")


def test_waiting_in_a_queue_is_no_failed_start(workload: Workload, operator: OperatorFactory, kueue: Kueue) -> None:
    """Trap 2: the queue's own time-out for pods and ours are of the same length, and neither is about waiting for room."""
    workload.apply(run={"startupDeadlineSeconds": 10, "queueName": "gpus"})
    operator()
    workload.succeed(Role.PREFLIGHT)
    held = kueue.hold(Role.TRAIN)
    created = datetime.fromisoformat(held["metadata"]["creationTimestamp"])
    workload.wait(lambda: (datetime.now(UTC) - created).total_seconds() > 12, "the startup deadline to pass")
    kueue.says(Role.TRAIN, 0, "WaitingForQuota", "12 s later")
    queued(workload, "Trained", "12 s later")
    assert workload.condition("Finished")["status"] != "True"
    kueue.admit(Role.TRAIN)
    workload.succeed(Role.TRAIN)
    workload.wait_for("Trained")


def test_every_attempt_queues_again_and_keeps_its_priority(workload: Workload, operator: OperatorFactory, kueue: Kueue) -> None:
    """Trap 3: a new attempt is a new Workload at the back of the queue."""
    workload.apply(run={"queueName": "gpus", "priorityClassName": "urgent"})
    operator()
    workload.succeed(Role.PREFLIGHT)
    (pod,) = workload.wait_for_pods(Role.TRAIN)
    workload.set_running(pod)
    workload.wait_for("Trained", "Unknown", "Running")
    workload.fail(pod, FailureClass.COLLECTIVE, "a peer was lost")
    second = kueue.hold(Role.TRAIN, 1)
    assert {name: second["metadata"]["labels"].get(name) for name in (QUEUE, PRIORITY)} == {QUEUE: "gpus", PRIORITY: "urgent"}
    assert "priorityClassName" not in second["spec"]["template"]["spec"], "the queue's priority is no PriorityClass of pods"
    kueue.says(Role.TRAIN, 1, "WaitingForQuota", "behind three others")
    queued(workload, "Trained", "behind three others")
    assert workload.status()["attempt"] == 1
    kueue.admit(Role.TRAIN, 1)
    workload.succeed(Role.TRAIN, 1)
    workload.wait_for("Trained")


def test_a_queue_label_on_the_job_itself_reaches_no_child(workload: Workload, operator: OperatorFactory) -> None:
    """Trap 4: as an external framework a labelled FineTuneJob would have all its Jobs held back, those without GPUs too."""
    workload.apply(run={"queueName": "gpus"})
    label = {"metadata": {"labels": {QUEUE: "elsewhere"}}}
    workload.kube.patch("FineTuneJob", workload.namespace, "tune", label)
    operator()
    workload.succeed(Role.PREFLIGHT)
    workload.wait_for_pods(Role.TRAIN)
    (preflight,), (train,) = workload.batch_jobs(Role.PREFLIGHT), workload.batch_jobs(Role.TRAIN)
    assert QUEUE not in preflight["metadata"]["labels"]
    assert train["metadata"]["labels"][QUEUE] == "gpus"


def test_what_a_flavor_puts_into_a_job_stays_there(workload: Workload, operator: OperatorFactory, kueue: Kueue) -> None:
    """Trap 5: node selectors and tolerations of an admitted Job are the queue's."""
    workload.apply(run={"queueName": "gpus"})
    operator()
    workload.succeed(Role.PREFLIGHT)
    before = kueue.hold(Role.TRAIN)
    queued(workload, "Trained", "queue holds the Job back")
    workload.wait(lambda: not workload.pods(Role.TRAIN), "the pods of the suspended Job to go")
    # As Kueue does, so that the template can be changed: https://kueue.sigs.k8s.io/docs/tasks/dev/integrate_a_custom_job/
    workload.kube.patch("Job", workload.namespace, before["metadata"]["name"], {"status": {"startTime": None}}, "status")
    flavor = {"nodeSelector": {"pool": "spot"}, "tolerations": [{"key": "spot", "operator": "Exists", "effect": "NoSchedule"}]}
    kueue.admit(Role.TRAIN, **flavor)
    (pod,) = workload.wait_for_pods(Role.TRAIN)
    assert pod["spec"]["nodeSelector"]["pool"] == "spot"
    workload.succeed(Role.TRAIN)
    workload.wait_for("Trained")
    after = kueue.job(Role.TRAIN)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["spec"]["template"]["spec"]["nodeSelector"] == {"pool": "spot"}


def test_a_preemption_is_an_interruption_that_counts_for_nothing(
    workload: Workload, operator: OperatorFactory, kueue: Kueue
) -> None:
    """Trap 7: suspended by somebody else is Queued, and a preempted attempt continues in the same Job."""
    workload.apply(run={"queueName": "gpus", "maxRestarts": 0})
    operator()
    workload.succeed(Role.PREFLIGHT)
    (pod,) = workload.wait_for_pods(Role.TRAIN)
    workload.set_running(pod)
    workload.wait_for("Trained", "Unknown", "Running")
    before = kueue.hold(Role.TRAIN)
    kueue.says(Role.TRAIN, 0, "Pending", "Waiting for quota", evicted="Preempted")
    queued(workload, "Trained", "Evicted (Preempted)")
    workload.wait(lambda: not workload.pods(Role.TRAIN), "the preempted pods to go")
    status = workload.status()
    assert [one.get("interruptions") for one in status["attempts"] if one.get("role", "train") == "train"] == [1]
    assert (status["attempt"], status["restarts"]["counted"], status["restarts"]["uncounted"]) == (0, 0, 0)
    kueue.admit(Role.TRAIN)
    workload.succeed(Role.TRAIN)
    workload.wait_for("Trained")
    assert kueue.job(Role.TRAIN)["metadata"]["uid"] == before["metadata"]["uid"]
    assert workload.status()["attempt"] == 0


def test_training_keeps_its_place_while_preflight_runs(workload: Workload, operator: OperatorFactory, kueue: Kueue) -> None:
    """Kueue orders by creation: `kueue.queueDuringPreflight` of a profile. The chart gives the right to it on request."""
    kube, profile = workload.kube, f"gated-{workload.namespace}"
    spec = workload.default_profile() | {"kueue": {"queueDuringPreflight": True}}
    with workload.profile(profile, **spec):
        workload.apply(profile=profile, run={"queueName": "gpus"})
        operator()
        held = kueue.job(Role.TRAIN)
        assert held["metadata"]["annotations"][GATES] == "finetune.dev/preflight"
        assert held["spec"]["suspend"] is True
        assert workload.condition("Prepared")["status"] == "Unknown"
        workload.succeed(Role.PREFLIGHT)
        told = workload.wait_for("Stalled", "True", "CreateRefused")
        assert 'cannot patch resource "jobs" in API group "batch"' in told["message"]
        rule = {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["patch"]}
        kube.create("Role", workload.namespace, {"metadata": {"name": "gates"}, "rules": [rule]})
        account = {"kind": "ServiceAccount", "name": RELEASE, "namespace": SYSTEM}
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "gates"}
        kube.create(
            "RoleBinding", workload.namespace, {"metadata": {"name": "gates"}, "roleRef": reference, "subjects": [account]}
        )
        workload.wait(lambda: GATES not in kueue.job(Role.TRAIN)["metadata"]["annotations"], "the gate to be taken off")
        workload.wait_for("Stalled", "False")
        queued(workload, "Trained", "queue holds the Job back")
        assert workload.pods(Role.TRAIN) == []
        kueue.admit(Role.TRAIN)
        workload.succeed(Role.TRAIN)
        workload.wait_for("Trained")
        assert kueue.job(Role.TRAIN)["metadata"]["uid"] == held["metadata"]["uid"]
        assert workload.status()["attempt"] == 0

"""The seven traps, with Kueue itself: it suspends, admits, preempts and speaks; the tests act as kubelets alone."""

from datetime import UTC, datetime

from finetune_job.failures import FailureClass
from finetune_job.names import Role
from tests.integration.conftest import OperatorFactory
from tests.integration.kube import Document
from tests.integration.workload import Workload
from tests.kueue.queues import POOL, Queues

QUEUE = "kueue.x-k8s.io/queue-name"


def queued(workload: Workload, condition: str, words: str) -> Document:
    """Wait until a stage is Queued with these words."""

    def told() -> Document | None:
        found = workload.condition(condition)
        return found if found.get("reason") == "Queued" and words in found.get("message", "") else None

    found: Document = workload.wait(told, f"{condition} to be Queued: {words}")
    return found


def test_a_default_queue_that_takes_every_job_of_the_namespace_is_waited_for(
    workload: Workload, operator: OperatorFactory, queues: Queues
) -> None:
    """Trap 1."""
    queues.make("default", cpu="0")
    workload.apply()
    operator()
    assert queues.job(Role.PREFLIGHT)["metadata"]["labels"][QUEUE] == "default"
    queued(workload, "Prepared", "Queue default: QuotaReserved")
    queues.set_quota()
    for role in (Role.PREFLIGHT, Role.TRAIN, Role.MERGE):
        workload.succeed(role)
    workload.wait_for("Succeeded")


def test_waiting_in_a_queue_is_no_failed_start(workload: Workload, operator: OperatorFactory, queues: Queues) -> None:
    """Trap 2."""
    queues.make(cpu="0")
    workload.apply(run={"startupDeadlineSeconds": 10, "queueName": "gpus"})
    operator()
    workload.succeed(Role.PREFLIGHT)
    created = datetime.fromisoformat(queues.job(Role.TRAIN)["metadata"]["creationTimestamp"])
    queued(workload, "Trained", "Queue gpus: QuotaReserved")
    workload.wait(lambda: (datetime.now(UTC) - created).total_seconds() > 15, "the startup deadline to pass")
    assert workload.condition("Finished")["status"] != "True"
    queues.set_quota()
    workload.succeed(Role.TRAIN)
    workload.wait_for("Trained")


def test_every_attempt_queues_again_and_keeps_its_priority(workload: Workload, operator: OperatorFactory, queues: Queues) -> None:
    """Trap 3."""
    queues.make()
    queues.make_priority("urgent", 1000)
    workload.apply(run={"queueName": "gpus", "priorityClassName": "urgent"})
    operator()
    workload.succeed(Role.PREFLIGHT)
    (pod,) = workload.wait_for_pods(Role.TRAIN)
    first = queues.kueues_view(Role.TRAIN)
    workload.set_running(pod)
    workload.wait_for("Trained", "Unknown", "Running")
    workload.fail(pod, FailureClass.COLLECTIVE, "a peer was lost")
    second = queues.kueues_view(Role.TRAIN, 1)
    assert first["metadata"]["uid"] != second["metadata"]["uid"]
    assert [one["spec"]["priority"] for one in (first, second)] == [1000, 1000]
    workload.succeed(Role.TRAIN, 1)
    workload.wait_for("Trained")


def test_a_queue_label_on_the_job_itself_reaches_no_child(workload: Workload, operator: OperatorFactory, queues: Queues) -> None:
    """Trap 4."""
    queues.make(cpu="0")
    workload.apply(run={"queueName": "gpus"})
    workload.kube.patch("FineTuneJob", workload.namespace, "tune", {"metadata": {"labels": {QUEUE: "gpus"}}})
    operator()
    workload.succeed(Role.PREFLIGHT)
    queued(workload, "Trained", "Queue gpus: QuotaReserved")
    owners = [one["metadata"]["ownerReferences"][0]["name"] for one in workload.kube.list("Workload", workload.namespace)]
    assert owners == ["tune-train-0"]


def test_what_a_flavor_puts_into_a_job_stays_there(workload: Workload, operator: OperatorFactory, queues: Queues) -> None:
    """Trap 5."""
    queues.make()
    workload.apply(run={"queueName": "gpus"})
    operator()
    workload.succeed(Role.PREFLIGHT)
    (pod,) = workload.wait_for_pods(Role.TRAIN)
    assert pod["spec"]["nodeSelector"]["pool"] == POOL
    assert POOL in [one.get("key") for one in pod["spec"]["tolerations"]]
    before = queues.job(Role.TRAIN)["metadata"]["uid"]
    workload.succeed(Role.TRAIN)
    workload.wait_for("Trained")
    after = queues.job(Role.TRAIN)
    assert (after["metadata"]["uid"], after["spec"]["template"]["spec"]["nodeSelector"]["pool"]) == (before, POOL)


def test_the_reason_is_the_workloads_own(workload: Workload, operator: OperatorFactory, queues: Queues) -> None:
    """Trap 6."""
    queues.make(cpu="0")
    workload.apply(run={"queueName": "gpus"})
    operator()
    workload.succeed(Role.PREFLIGHT)
    told = queued(workload, "Trained", "QuotaReserved")["message"]
    conditions = queues.kueues_view(Role.TRAIN)["status"]["conditions"]
    (reserved,) = [one for one in conditions if one["type"] == "QuotaReserved"]
    assert told == f"Queue gpus: QuotaReserved ({reserved['reason']}): {reserved['message']}"
    assert "cpu" in reserved["message"]


def test_a_preemption_is_an_interruption_that_counts_for_nothing(
    workload: Workload, operator: OperatorFactory, queues: Queues
) -> None:
    """Trap 7."""
    queues.make()
    queues.make_priority("urgent", 1000)
    workload.apply(run={"queueName": "gpus", "maxRestarts": 0})
    operator()
    workload.succeed(Role.PREFLIGHT)
    (pod,) = workload.wait_for_pods(Role.TRAIN)
    workload.set_running(pod)
    workload.wait_for("Trained", "Unknown", "Running")
    before = queues.job(Role.TRAIN)["metadata"]["uid"]
    room = queues.cpu_of_training()
    queues.set_quota(cpu=room)
    queues.other_job("urgent", cpu=room)
    queued(workload, "Trained", "Evicted (Preempted)")
    workload.wait(lambda: not workload.pods(Role.TRAIN), "the preempted pods to go")
    status = workload.status()
    assert [one.get("interruptions") for one in workload.attempts(Role.TRAIN)] == [1]
    assert (status["attempt"], status["restarts"]["counted"], status["restarts"]["uncounted"]) == (0, 0, 0)
    workload.kube.delete("Job", workload.namespace, "other")
    workload.succeed(Role.TRAIN)
    workload.wait_for("Trained")
    assert (queues.job(Role.TRAIN)["metadata"]["uid"], workload.status()["attempt"]) == (before, 0)

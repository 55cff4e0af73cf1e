"""Training waits in its queue while preflight runs: Kueue does not admit it before, nor let younger Jobs go first after it."""

from finetune_job.names import Role
from tests.integration.conftest import OperatorFactory
from tests.integration.kube import Document
from tests.integration.workload import Workload
from tests.kueue.queues import Queues

GATES = "kueue.x-k8s.io/admission-gated-by"


def start(workload: Workload, operator: OperatorFactory, queues: Queues) -> None:
    """A job whose preflight runs, and whose training is in the queue."""
    queues.make_profile("gated", kueue={"queueDuringPreflight": True})
    queues.make_priority("normal", 0)
    workload.apply(profile="gated", run={"queueName": "gpus"})
    operator()
    assert gates(queues.job(Role.TRAIN)) == "finetune.dev/preflight"


def gates(item: Document) -> str:
    found: str = (item["metadata"].get("annotations") or {}).get(GATES, "")
    return found


def is_suspended(workload: Workload, name: str) -> bool:
    job = workload.kube.get("Job", workload.namespace, name)
    assert job is not None
    return job["spec"].get("suspend") is True


def test_no_room_is_room_enough_before_preflight_has_passed(
    workload: Workload, operator: OperatorFactory, queues: Queues
) -> None:
    queues.make()
    start(workload, operator, queues)
    assert gates(queues.kueues_view(Role.TRAIN)) == "finetune.dev/preflight"
    queues.other_job("normal", cpu=queues.cpu_of_training())
    workload.wait(lambda: not is_suspended(workload, "other"), "Kueue to admit a younger Job")
    assert is_suspended(workload, "tune-train-0")
    workload.succeed(Role.PREFLIGHT)
    workload.succeed(Role.TRAIN)
    workload.wait_for("Trained")


def test_the_place_is_that_of_the_beginning_of_preflight(workload: Workload, operator: OperatorFactory, queues: Queues) -> None:
    queues.make(cpu="0")
    start(workload, operator, queues)
    queues.kueues_view(Role.TRAIN)
    queues.other_job("normal", cpu=queues.cpu_of_training())
    workload.succeed(Role.PREFLIGHT)
    workload.wait(lambda: not gates(queues.kueues_view(Role.TRAIN)), "the gate to be taken off")
    queues.set_quota(cpu=queues.cpu_of_training())
    workload.wait_for_pods(Role.TRAIN)
    assert is_suspended(workload, "other"), "the younger Job went first"

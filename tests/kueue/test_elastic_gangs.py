"""An elastic gang asks Kueue for fewer nodes when it is not admitted, and for all of them again when nobody waits."""

from datetime import UTC, datetime

from finetune_job.names import Role
from finetune_job.progress import Progress
from tests.integration.conftest import OperatorFactory
from tests.integration.kube import Document
from tests.integration.rank_zero import rank_zero
from tests.integration.workload import SPEC, Workload
from tests.kueue.queues import Queues

GANG = {
    "training": SPEC["training"] | {"reduction": "Ordered"},
    "parallelism": {"nodes": 2, "elastic": {"minNodes": 1}},
    "run": {"queueName": "gpus", "maxRestarts": 0},
}
ADDRESS = "127.0.0.97"


def runs_on(workload: Workload, queues: Queues, attempt: int, nodes: int, address: str = "10.0.0.1") -> Document:
    """Once the pods of an attempt are there, they run."""
    pods = workload.wait_for_pods(Role.TRAIN, attempt, number=nodes)
    spec = queues.job(Role.TRAIN, attempt)["spec"]
    assert (spec["parallelism"], spec["completions"]) == (nodes, nodes)
    for pod in pods:
        workload.set_running(pod, address)
    workload.wait(lambda: workload.condition("Trained")["message"].endswith(f"runs on {nodes} of 2 nodes."), f"{nodes} to run")
    return workload.status()


def start(workload: Workload, operator: OperatorFactory, queues: Queues) -> str:
    """A gang for which its queue has no room yet. Returns the CPU that one of its pods needs."""
    queues.make_profile("patient", elastic={"growAfterSeconds": 10, "shrinkAfterSeconds": 10})
    queues.make(cpu="0")
    workload.apply(**GANG, profile="patient")
    operator()
    workload.succeed(Role.PREFLIGHT)
    return queues.cpu_of_training()


def test_a_gang_that_is_not_admitted_asks_for_fewer_nodes(workload: Workload, operator: OperatorFactory, queues: Queues) -> None:
    queues.set_quota(cpu=start(workload, operator, queues))
    status = runs_on(workload, queues, 1, 1)
    first, second = workload.attempts(Role.TRAIN)
    assert (first["outcome"], first["nodes"], first.get("counted", False)) == ("Resized", 2, False)
    assert (status["gangNodes"], second["nodes"], second["ranks"]) == (1, 1, 1)
    workload.succeed(Role.TRAIN, 1)
    workload.wait_for("Trained")


def test_a_gang_that_was_preempted_continues_on_fewer_nodes(
    workload: Workload, operator: OperatorFactory, queues: Queues
) -> None:
    queues.make_priority("urgent", 1000)
    one = start(workload, operator, queues)
    queues.set_quota(cpu=f"{2 * int(one)}")
    runs_on(workload, queues, 0, 2)
    queues.other_job("urgent", cpu=one)
    status = runs_on(workload, queues, 1, 1)
    first = workload.attempts(Role.TRAIN)[0]
    assert (first["outcome"], first["nodes"], first["interruptions"]) == ("Resized", 2, 1)
    assert (status["restarts"]["counted"], status["restarts"]["uncounted"]) == (0, 0)
    workload.succeed(Role.TRAIN, 1)
    workload.wait_for("Trained")


def test_a_gang_asks_for_more_when_nobody_waits(workload: Workload, operator: OperatorFactory, queues: Queues) -> None:
    one = start(workload, operator, queues)
    queues.set_quota(cpu=one)
    queues.make_priority("normal", 0)
    with rank_zero(ADDRESS, _progress(10)):
        runs_on(workload, queues, 1, 1, ADDRESS)
        workload.wait(lambda: _checkpoint(workload) == 10, "the first checkpoint")
    queues.other_job("normal", cpu=one)
    workload.wait(lambda: queues.num_waiting() == 1, "somebody to wait")
    running = datetime.fromisoformat(workload.attempts(Role.TRAIN)[1]["runningTime"])
    # The first attempt never ran, so the gang waits for twice the time.
    workload.wait(lambda: (datetime.now(UTC) - running).total_seconds() > 22, "it to have trained for long enough")
    with rank_zero(ADDRESS, _progress(20)):
        workload.wait(lambda: _checkpoint(workload) == 20, "a checkpoint while somebody waits")
    assert workload.status()["attempt"] == 1
    workload.kube.delete("Job", workload.namespace, "other")
    queues.set_quota(cpu=f"{2 * int(one)}")
    workload.wait(lambda: queues.num_waiting() == 0, "nobody to wait")
    with rank_zero(ADDRESS, _progress(30)):
        workload.wait(lambda: workload.status()["attempt"] == 2, "the gang to ask for more")
    status = runs_on(workload, queues, 2, 2)
    smaller = workload.attempts(Role.TRAIN)[1]
    assert (smaller["outcome"], smaller["nodes"], smaller.get("counted", False)) == ("Resized", 1, False)
    assert status["gangNodes"] == 2
    workload.succeed(Role.TRAIN, 2, nodes=2)
    workload.wait_for("Trained")


def _progress(checkpoint: int) -> Progress:
    return Progress(attempt=1, step=checkpoint + 1, total_steps=1000, checkpoint_step=checkpoint, seconds_left=10_000)


def _checkpoint(workload: Workload) -> int | None:
    found: int | None = workload.status().get("progress", {}).get("checkpointStep")
    return found

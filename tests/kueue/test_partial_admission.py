"""Kueue admits a part of an elastic gang, takes it back and lets another part go; the gang asks for more when nobody waits."""

from __future__ import annotations

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


def told(workload: Workload) -> dict[str, str]:
    """What the pods of the gang read."""
    found = workload.kube.get("ConfigMap", workload.namespace, "tune-nodes")
    return found["data"] if found is not None else {}


def runs_on(workload: Workload, queues: Queues, attempt: int, nodes: int, address: str = "10.0.0.1") -> Document:
    """Once the pods of an attempt are there and know how many they are, they run."""
    pods = workload.wait_for_pods(Role.TRAIN, attempt, number=nodes)
    workload.wait(lambda: told(workload) == {f"attempt-{attempt}": str(nodes)}, f"the pods to be told that they are {nodes}")
    spec = queues.job(Role.TRAIN, attempt)["spec"]
    assert (spec["parallelism"], spec["completions"]) == (nodes, nodes)
    for pod in pods:
        workload.set_running(pod, address)
    workload.wait(lambda: workload.condition("Trained")["message"].endswith(f"runs on {nodes} of 2 nodes."), f"{nodes} to run")
    return workload.status()


def start(workload: Workload, operator: OperatorFactory, queues: Queues, profile: str = "default") -> str:
    """A gang for which its queue has no room yet. Returns the CPU that one of its pods needs."""
    queues.make(cpu="0")
    workload.apply(**GANG, profile=profile)
    operator()
    workload.succeed(Role.PREFLIGHT)
    return queues.cpu_of_training()


def test_a_gang_starts_with_the_part_for_which_there_is_room(
    workload: Workload, operator: OperatorFactory, queues: Queues
) -> None:
    queues.set_quota(cpu=start(workload, operator, queues))
    status = runs_on(workload, queues, 0, 1)
    assert (status["gangNodes"], status["attempts"][-1]["nodes"], status["attempts"][-1]["ranks"]) == (1, 1, 1)
    workload.succeed(Role.TRAIN)
    workload.wait_for("Trained")
    workload.wait(lambda: told(workload) == {}, "what told the pods to be gone")


def test_a_gang_that_was_preempted_comes_back_with_a_part(workload: Workload, operator: OperatorFactory, queues: Queues) -> None:
    queues.make_priority("urgent", 1000)
    one = start(workload, operator, queues)
    queues.set_quota(cpu=f"{2 * int(one)}")
    assert runs_on(workload, queues, 0, 2)["gangNodes"] == 2
    before = queues.job(Role.TRAIN)["metadata"]["uid"]
    queues.other_job("urgent", cpu=one)
    status = runs_on(workload, queues, 0, 1)
    (record,) = workload.attempts(Role.TRAIN)
    assert (record["nodes"], record["interruptions"], status["attempt"], status["gangNodes"]) == (1, 1, 0, 1)
    assert queues.job(Role.TRAIN)["metadata"]["uid"] == before, "it has kept its place in the queue"
    assert (status["restarts"]["counted"], status["restarts"]["uncounted"]) == (0, 0)
    workload.succeed(Role.TRAIN)
    workload.wait_for("Trained")


def test_a_gang_asks_for_more_when_nobody_waits(workload: Workload, operator: OperatorFactory, queues: Queues) -> None:
    queues.make_profile("patient", elastic={"growAfterSeconds": 10, "shrinkAfterSeconds": 10})
    one = start(workload, operator, queues, "patient")
    queues.set_quota(cpu=one)
    queues.make_priority("normal", 0)
    with rank_zero(ADDRESS, _progress(10)):
        runs_on(workload, queues, 0, 1, ADDRESS)
        workload.wait(lambda: _checkpoint(workload) == 10, "the first checkpoint")
    queues.other_job("normal", cpu=one)
    workload.wait(lambda: queues.num_waiting() == 1, "somebody to wait")
    running = datetime.fromisoformat(workload.attempts(Role.TRAIN)[0]["runningTime"])
    workload.wait(lambda: (datetime.now(UTC) - running).total_seconds() > 12, "it to have trained for long enough")
    with rank_zero(ADDRESS, _progress(20)):
        workload.wait(lambda: _checkpoint(workload) == 20, "a checkpoint while somebody waits")
    assert workload.status()["attempt"] == 0
    workload.kube.delete("Job", workload.namespace, "other")
    queues.set_quota(cpu=f"{2 * int(one)}")
    workload.wait(lambda: queues.num_waiting() == 0, "nobody to wait")
    with rank_zero(ADDRESS, _progress(30)):
        workload.wait(lambda: workload.status()["attempt"] == 1, "the gang to ask for more")
    status = runs_on(workload, queues, 1, 2)
    first = workload.attempts(Role.TRAIN)[0]
    assert (first["outcome"], first["nodes"], first.get("counted", False), status["gangNodes"]) == ("Resized", 1, False, 2)
    workload.succeed(Role.TRAIN, 1, nodes=2)
    workload.wait_for("Trained")


def _progress(checkpoint: int) -> Progress:
    return Progress(attempt=0, step=checkpoint + 1, total_steps=1000, checkpoint_step=checkpoint, seconds_left=10_000)


def _checkpoint(workload: Workload) -> int | None:
    found: int | None = workload.status().get("progress", {}).get("checkpointStep")
    return found

"""A queue preempts the run that loses least: what the operator tells of a run's checkpoints, Kueue itself weighs."""

from __future__ import annotations

from finetune_job.names import Role
from finetune_job.progress import Progress
from tests.integration.conftest import OperatorFactory
from tests.integration.rank_zero import rank_zero
from tests.integration.workload import Workload
from tests.kueue.queues import Queues

BOOST = "kueue.x-k8s.io/priority-boost"
RANK_ZERO = "127.94.0.2"


def train_with_a_boost_of_40(workload: Workload, operator: OperatorFactory, queues: Queues) -> None:
    """A run whose pods run, in a queue that has room for it alone.

    The first Job of a StrictFIFO queue is weighed again and again. One of BestEffortFIFO that found no victim waits until
    something ends or quota changes, for a boost that falls is no event to Kueue; so do younger ones of its shape and priority.
    """
    queues.make(strategy="StrictFIFO")
    queues.make_profile("boosted", kueue={"checkpointPriorityBoost": 40})
    steps = {"training": {"maxSteps": 1000, "globalBatchSize": 4}, "checkpoint": {"everySteps": 100}}
    workload.apply(profile="boosted", run={"queueName": "gpus"}, **steps)
    operator()
    workload.succeed(Role.PREFLIGHT)
    (pod,) = workload.wait_for_pods(Role.TRAIN)
    workload.set_running(pod, RANK_ZERO)
    queues.set_quota(cpu=queues.cpu_of_training())


def wait_for_boost(workload: Workload, queues: Queues, boost: str) -> None:
    def told() -> bool:
        annotations: dict[str, str] = queues.kueues_view(Role.TRAIN)["metadata"].get("annotations") or {}
        return annotations.get(BOOST) == boost

    workload.wait(told, f"a boost of {boost}")


def tell(workload: Workload, queues: Queues, boost: str, *, step: int, checkpoint: int) -> None:
    """Rank 0 is that far; the boost follows."""
    with rank_zero(RANK_ZERO, Progress(attempt=0, step=step, total_steps=1000, checkpoint_step=checkpoint)):
        wait_for_boost(workload, queues, boost)


def is_suspended(queues: Queues) -> bool:
    return queues.job(Role.TRAIN)["spec"]["suspend"] is True


def test_a_run_is_preempted_after_its_checkpoint_and_not_before(
    workload: Workload, operator: OperatorFactory, queues: Queues
) -> None:
    queues.make_priority("between", 20)
    train_with_a_boost_of_40(workload, operator, queues)
    tell(workload, queues, "30", step=375, checkpoint=300)
    queues.other_job("between", cpu=queues.cpu_of_training())
    tell(workload, queues, "40", step=399, checkpoint=300)
    assert not is_suspended(queues), "a Job of priority 20 took the room of one of 0 and a boost of 30"
    tell(workload, queues, "0", step=401, checkpoint=400)
    workload.wait(lambda: is_suspended(queues), "Kueue to preempt the run that has just saved")


def test_a_preempted_run_waits_without_its_boost(workload: Workload, operator: OperatorFactory, queues: Queues) -> None:
    queues.make_priority("urgent", 1000)
    train_with_a_boost_of_40(workload, operator, queues)
    tell(workload, queues, "40", step=399, checkpoint=300)
    queues.other_job("urgent", cpu=queues.cpu_of_training())
    workload.wait(lambda: is_suspended(queues), "Kueue to preempt the run")
    wait_for_boost(workload, queues, "0")

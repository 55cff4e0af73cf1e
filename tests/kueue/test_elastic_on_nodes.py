"""An elastic gang of a queue on real nodes with real training: however many nodes Kueue admits, the result has the same bytes."""

from collections.abc import Iterator

import pytest

from finetune_job.names import Role
from tests.e2e.failures.scene import Scene
from tests.e2e.test_two_nodes import SPEC, assert_one_node_gives_the_same
from tests.integration.kube import Kube
from tests.integration.workload import Workload
from tests.kueue.conftest import given_kueue
from tests.kueue.queues import Queues
from tests.kueue.real_kueue import start_kueue
from tools.cluster.requirements import unsupported_reason
from tools.stack import NAMESPACE, Stack

GANG = "elastic-queued"
QUEUE = {"queueName": "gpus"}
PROFILE = {"elastic": {"shrinkAfterSeconds": 60, "growAfterSeconds": 10}}
CPU = 100
"""Milli-CPU of a training pod of the nodes' profile."""


@pytest.fixture
def stack() -> Iterator[Stack]:
    """Two nodes and Kueue."""
    kueue = given_kueue()
    reason = unsupported_reason()
    if reason is not None:
        pytest.skip(f"no real node here: {reason}")
    with Stack(nodes=2, kueue={"readQueues": True}) as running:
        start_kueue(running.cluster.control_plane, *kueue)
        yield running


@pytest.fixture
def queues(stack: Stack) -> Iterator[Queues]:
    """Room for two pods, on nodes as they are."""
    kube = Kube(stack.cluster.kubeconfig)
    found = Queues(kube, Workload(kube, NAMESPACE))
    found.make(flavor={}, cpu=f"{2 * CPU}m")
    found.make_priority("urgent", 1000)
    yield found
    found.remove()


@pytest.mark.timeout(1800)
def test_a_preempted_gang_continues_on_fewer_nodes_and_ends_with_the_same_bytes(stack: Stack, queues: Queues) -> None:
    gang = Scene(stack, GANG)
    try:
        gang.start(spec=SPEC | {"run": QUEUE}, profile=PROFILE)
        gang.wait_for_checkpoint()
        gang.start_clock()
        queues.other_job("urgent", cpu=f"{CPU}m")
        gang.wait(lambda: gang.status().get("gangNodes") == 1, "a gang on one node")
        gang.wait_for_step_after(gang.last_step())
        print(f"{gang.seconds} s from the eviction to the next trained step, on one node")
        queues.kube.delete("Job", NAMESPACE, "other")
        gang.start_clock()
        gang.wait(lambda: gang.status()["attempts"][-1].get("nodes") == 2, "a gang on two nodes")
        gang.wait_for_next_step()
        print(f"{gang.seconds} s from the room to the next trained step, on two")
        seen = gang.finish()
        assert (seen.final, seen.failures, seen.resumes) == ("Succeeded", (), True)
        attempts = [one for one in gang.status()["attempts"] if one.get("role", "train") == Role.TRAIN]
        sizes = [(one["outcome"], one["nodes"], one.get("interruptions", 0)) for one in attempts]
        print(sizes)
        assert (sizes[0], sizes[-1]) == (("Resized", 2, 1), ("Succeeded", 2, 0))
        assert_one_node_gives_the_same(stack, gang)
    finally:
        gang.leave()

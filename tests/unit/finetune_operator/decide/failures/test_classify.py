"""Evidence -> failure class and root rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_job.failures import CLASS_OF_EXIT_CODE, FailureClass, Outcome
from finetune_job.names import Role
from finetune_operator.decide.failures.classify import EVIDENCE_LIMIT, classify, classify_pod
from finetune_operator.decide.failures.restart_policy import POLICY
from finetune_operator.decide.seen.children_seen import PodView
from tests.support.builders import T0, after, envelope


def pod(node_rank: int = 0, **fields: object) -> PodView:
    if fields.get("exit_code") is not None:
        fields = {"phase": "Failed", "finished": T0, **fields}
    return PodView(f"gang-{node_rank}", f"uid-{node_rank}", Role.TRAIN, 0, created=after(-60), node_rank=node_rank, **fields)  # type: ignore[arg-type]


F = FailureClass
OVER_TMP = 'Usage of EmptyDir volume "tmp" exceeds the limit "1Gi". '
OVER_SHM = 'Usage of EmptyDir volume "shared-memory" exceeds the limit "1Gi". '
OVER_POD = "Pod ephemeral local storage usage exceeds the total limit of containers 2Gi. "
OVER_CONTAINER = 'Container trainer exceeded its local ephemeral storage limit "2Gi". '
NODE_IS_LOW = "The node was low on resource: ephemeral-storage. Threshold quantity: 10Gi, available: 9Gi. "
CASES: dict[str, tuple[PodView, FailureClass | None]] = {
    "a running pod": (pod(phase="Running"), None),
    "a pod that succeeded": (pod(exit_code=0), None),
    "a pod that said it succeeded but did not": (pod(exit_code=1, termination_message=envelope()), F.INTERNAL),
    "the envelope says the class": (pod(exit_code=1, termination_message=envelope(F.NON_FINITE)), F.NON_FINITE),
    "the envelope wins over the exit code": (pod(exit_code=52, termination_message=envelope(F.DISK_FULL)), F.DISK_FULL),
    "the envelope wins over a disruption that came later": (
        pod(exit_code=43, termination_message=envelope(F.NON_FINITE), disruption="EvictionByEvictionAPI"),
        F.NON_FINITE,
    ),
    "the kernel's verdict wins over a supervisor that only saw a crash": (
        pod(exit_code=52, termination_message=envelope(F.INTERNAL), reason="OOMKilled"),
        F.HOST_OUT_OF_MEMORY,
    ),
    "device memory stays device memory although the host ran short too": (
        pod(exit_code=44, termination_message=envelope(F.DEVICE_OUT_OF_MEMORY), reason="OOMKilled"),
        F.DEVICE_OUT_OF_MEMORY,
    ),
    "killed for memory": (pod(exit_code=137, reason="OOMKilled"), F.HOST_OUT_OF_MEMORY),
    "killed, not for memory": (pod(exit_code=137, reason="Error"), F.INTERNAL),
    "found dead by the container runtime after its node was restarted": (pod(exit_code=255, reason="Unknown"), F.INFRASTRUCTURE),
    "found dead by the kubelet after its node was restarted": (
        pod(exit_code=137, reason="ContainerStatusUnknown"),
        F.INFRASTRUCTURE,
    ),
    "said that a collective failed before its node was restarted": (
        pod(exit_code=255, reason="Unknown", termination_message=envelope(F.COLLECTIVE)),
        F.INFRASTRUCTURE,
    ),
    "said that it has no memory before its node was restarted": (
        pod(exit_code=255, reason="Unknown", termination_message=envelope(F.DEVICE_OUT_OF_MEMORY)),
        F.DEVICE_OUT_OF_MEMORY,
    ),
    "evicted for the limit of a volume": (pod(exit_code=137, reason="Error", eviction=OVER_TMP), F.DISK_FULL),
    "evicted for the limit of a volume, seen while its container was running": (
        pod(phase="Failed", reason="Evicted", eviction=OVER_TMP),
        F.DISK_FULL,
    ),
    "evicted for the limit of all containers": (pod(exit_code=137, eviction=OVER_POD), F.DISK_FULL),
    "evicted for the limit of a container": (pod(exit_code=143, eviction=OVER_CONTAINER), F.DISK_FULL),
    "evicted for the limit of shared memory": (pod(exit_code=137, eviction=OVER_SHM), F.HOST_OUT_OF_MEMORY),
    "evicted for the node's sake": (
        pod(exit_code=137, reason="Error", eviction=NODE_IS_LOW, disruption="TerminationByKubelet"),
        F.INFRASTRUCTURE,
    ),
    "evicted for the node's sake by an old kubelet": (
        pod(phase="Failed", reason="Evicted", eviction=NODE_IS_LOW),
        F.INFRASTRUCTURE,
    ),
    "evicted by the API while it was over a limit": (
        pod(exit_code=143, eviction=OVER_TMP, disruption="EvictionByEvictionAPI"),
        F.INFRASTRUCTURE,
    ),
    "killed for memory and evicted": (pod(exit_code=137, reason="OOMKilled", eviction=OVER_TMP), F.HOST_OUT_OF_MEMORY),
    "said what failed before it was evicted": (
        pod(exit_code=43, termination_message=envelope(F.NON_FINITE), eviction=OVER_TMP),
        F.NON_FINITE,
    ),
    "crashed over a full volume before it was evicted": (
        pod(exit_code=52, termination_message=envelope(F.INTERNAL), eviction=OVER_TMP),
        F.DISK_FULL,
    ),
    "ended by SIGTERM": (pod(exit_code=143), F.PREEMPTED),
    "evicted while it saved": (
        pod(exit_code=50, termination_message=envelope(F.PREEMPTED), disruption="EvictionByEvictionAPI"),
        F.INFRASTRUCTURE,
    ),
    "evicted by the kubelet": (pod(phase="Failed", reason="Evicted"), F.INFRASTRUCTURE),
    "evicted when its node was lost": (
        pod(phase="Running", disruption="DeletionByTaintManager", deletion_requested=T0),
        F.NODE_LOST,
    ),
    "collected after its node was removed": (pod(phase="Failed", disruption="DeletionByPodGC"), F.NODE_LOST),
    "preempted by the scheduler": (pod(phase="Running", disruption="PreemptionByScheduler"), F.INFRASTRUCTURE),
    "rejected by the device plugin": (pod(phase="Failed", reason="UnexpectedAdmissionError"), F.REJECTED),
    "rejected for want of cores, and deleted by the Job controller": (
        pod(phase="Failed", reason="OutOfcpu", deletion_requested=T0),
        F.REJECTED,
    ),
    "ended with its node": (pod(phase="Failed", reason="Terminated"), F.INFRASTRUCTURE),
    "deleted by somebody": (pod(phase="Running", deletion_requested=T0), F.INFRASTRUCTURE),
    "killed at the end of its grace period": (pod(exit_code=137, deletion_requested=after(-60)), F.INFRASTRUCTURE),
    "gone without a trace": (pod(phase="Running", gone=True), F.INFRASTRUCTURE),
    "a text that is no envelope": (pod(exit_code=1, termination_message="Traceback: ..."), F.INTERNAL),
    "an unknown exit code": (pod(exit_code=77), F.INTERNAL),
    "failed without any status": (pod(phase="Failed"), F.UNKNOWN),
    "refused without a class": (pod(exit_code=40, termination_message=envelope(outcome=Outcome.REFUSED)), F.USER_CONFIG),
}


@pytest.mark.parametrize("case", CASES)
def test_one_pod(case: str) -> None:
    view, expected = CASES[case]
    found = classify_pod(view)
    assert (found.failure if found is not None else None) == expected


@pytest.mark.parametrize(("code", "expected"), CLASS_OF_EXIT_CODE.items())
def test_an_exit_code_alone_says_the_class(code: int, expected: FailureClass) -> None:
    found = classify_pod(pod(exit_code=code))
    assert found.failure is expected


GANGS: dict[str, tuple[list[PodView], FailureClass, int]] = {
    "the cause beats an echo that was seen first": (
        [pod(0, exit_code=47, finished=after(-9)), pod(1, exit_code=44, finished=after(-8))],
        F.DEVICE_OUT_OF_MEMORY,
        1,
    ),
    "of two causes the earlier": (
        [pod(0, exit_code=52, finished=after(-2)), pod(1, exit_code=43, finished=after(-3))],
        F.NON_FINITE,
        1,
    ),
    "the envelope's time is finer than the kubelet's": (
        [
            pod(0, exit_code=52, termination_message=envelope(F.INTERNAL, time=T0.timestamp() - 0.5)),
            pod(1, exit_code=43, termination_message=envelope(F.NON_FINITE, time=T0.timestamp() - 0.6)),
        ],
        F.NON_FINITE,
        1,
    ),
    "a failed collective beats the deletions that it brought about": (
        [pod(0, exit_code=50, deletion_requested=after(-2)), pod(1, exit_code=47, finished=after(-5))],
        F.COLLECTIVE,
        1,
    ),
    "a deletion beats the collective that it broke": (
        [pod(0, phase="Running", deletion_requested=after(-5)), pod(1, exit_code=47, finished=after(-2))],
        F.INFRASTRUCTURE,
        0,
    ),
    "a deletion in the same second as the report that caused it, for the API server cuts its times to seconds": (
        [
            pod(0, phase="Running", deletion_requested=T0),
            pod(1, exit_code=47, finished=T0, termination_message=envelope(F.COLLECTIVE, time=T0.timestamp() + 0.3)),
        ],
        F.COLLECTIVE,
        1,
    ),
    "a restarted node beats the collective that it broke": (
        [pod(0, exit_code=47, finished=after(-9)), pod(1, exit_code=255, reason="Unknown", finished=after(-5))],
        F.INFRASTRUCTURE,
        1,
    ),
    "an eviction beats the collective that it broke": (
        [pod(0, exit_code=47, finished=after(-9)), pod(1, exit_code=137, disruption="PreemptionByScheduler", finished=after(-5))],
        F.INFRASTRUCTURE,
        1,
    ),
}


@pytest.mark.parametrize("case", GANGS)
def test_a_gang(case: str) -> None:
    pods, expected, root = GANGS[case]
    found = classify(pods, FailureClass.UNKNOWN, "nothing")
    assert (found.failure, found.evidence[0].node_rank) == (expected, root)


def test_a_gang_without_evidence_is_what_the_caller_says() -> None:
    found = classify([pod(phase="Running")], FailureClass.UNKNOWN, "the Job failed")
    assert (found.failure, found.message, found.evidence) == (FailureClass.UNKNOWN, "the Job failed", ())


def test_a_report_that_was_handed_on_keeps_its_origin() -> None:
    message = envelope(F.NON_FINITE, node_rank=3, rank=25, step=12, hint="lower it")
    found = classify([pod(0, exit_code=43, termination_message=message)], FailureClass.UNKNOWN, "")
    assert (found.evidence[0].node_rank, found.evidence[0].rank, found.evidence[0].step) == (3, 25, 12)
    assert found.hint == "lower it"
    assert found.message.startswith("rank 25, step 12, pod gang-0")


def test_evidence_is_bounded() -> None:
    found = classify([pod(rank, exit_code=52) for rank in range(100)], FailureClass.UNKNOWN, "")
    assert len(found.evidence) == EVIDENCE_LIMIT


def test_every_class_has_its_advice() -> None:
    assert {failure for failure in FailureClass if not POLICY[failure].advice} == {FailureClass.PREEMPTED}


@given(
    st.permutations([pod(0, exit_code=47), pod(1, exit_code=44), pod(2, exit_code=50, deletion_requested=T0), pod(3, gone=True)])
)
def test_the_order_in_which_pods_are_seen_does_not_matter(pods: list[PodView]) -> None:
    assert classify(pods, FailureClass.UNKNOWN, "") == classify(sorted(pods, key=lambda one: one.name), FailureClass.UNKNOWN, "")


def test_a_broken_device_is_reported_with_its_node() -> None:
    found = classify_pod(pod(exit_code=57, termination_message=envelope(F.DEVICE_FAULT, message="GPU 3 is wrong"), node="node-a"))
    assert (found.failure, found.message) == (F.DEVICE_FAULT, "on node node-a, GPU 3 is wrong")


@pytest.mark.parametrize(
    ("eviction", "advice"),
    [(OVER_TMP, "scratchStorage"), (OVER_CONTAINER, "scratchStorage"), (OVER_SHM, "sharedMemory in resources.train")],
)
def test_an_eviction_for_a_limit_has_the_kubelets_words_and_the_limit_to_change(eviction: str, advice: str) -> None:
    found = classify([pod(exit_code=137, reason="Error", eviction=eviction)], F.INTERNAL, "")
    assert eviction.strip() in found.message
    assert advice in found.hint


def test_what_a_rank_said_of_a_full_disk_is_kept_although_the_pod_was_evicted() -> None:
    seen = pod(exit_code=51, termination_message=envelope(F.DISK_FULL), eviction=OVER_TMP)
    found = classify([seen], F.INTERNAL, "")
    assert found.failure is F.DISK_FULL
    assert "Usage of EmptyDir" not in found.message

"""Why a queue holds a Job back: in Kueue's own words, and without Kueue hardly ever asked."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from finetune_job.names import Role
from finetune_operator.client.answers import ApiError
from finetune_operator.client.kinds import Kind
from finetune_operator.decide.seen.children_seen import BatchJobView, JobConditionView
from finetune_operator.passes.workloads import Workloads, num_waiting, reason_of
from tests.support.cases import table

NOW = datetime(2026, 1, 2, 3, 5, tzinfo=UTC)


def workload(*conditions: tuple[str, str, str, str], **more: Any) -> dict[str, Any]:
    listed = [{"type": kind, "status": state, "reason": reason, "message": said} for kind, state, reason, said in conditions]
    return {"spec": {"queueName": "gpus", "active": more.pop("active", True)}, "status": {"conditions": listed, **more}}


PENDING = workload(("QuotaReserved", "False", "Pending", "couldn't assign flavors to pod set main: insufficient unused quota"))


class Kueue:
    """Answers lists of Workloads. `served`: its versions; `refusal`: what the others are answered with."""

    def __init__(self, *served: str, refusal: int = 404) -> None:
        self.served = served
        self.refusal = refusal
        self.by_job: dict[str, dict[str, Any]] = {"a": PENDING}
        self.asked: list[str] = []

    async def list(self, kind: Kind, namespace: str, *, label_selector: str) -> list[dict[str, Any]]:
        assert (kind.group, kind.plural, namespace) == ("kueue.x-k8s.io", "workloads", "team")
        self.asked.append(kind.version)
        if kind.version not in self.served:
            raise ApiError("LIST", self.refusal, "", "the server could not find the requested resource")
        label, _, uid = label_selector.partition("=")
        assert label == "kueue.x-k8s.io/job-uid"
        return [self.by_job[uid]] if uid in self.by_job else []


def batch_job(uid: str = "a", **fields: Any) -> BatchJobView:
    return BatchJobView("tune-train-0", uid, Role.TRAIN, 0, created=NOW, **{"suspended": True, **fields})


def look(workloads: Workloads, seconds: float, *jobs: BatchJobView) -> tuple[tuple[str, ...], list[float]]:
    revisits: list[float] = []
    told = asyncio.run(workloads.with_messages(jobs or (batch_job(),), "team", NOW + timedelta(seconds=seconds), revisits))
    return tuple(job.queue for job in told), revisits


def readers(*served: str, **how: Any) -> tuple[Kueue, Workloads]:
    kueue = Kueue(*served, **how)
    api: Any = kueue
    return kueue, Workloads(api)


def test_the_workloads_own_reason_is_reported_and_read_again_every_minute() -> None:
    kueue, workloads = readers("v1beta2")
    said = "Queue gpus: QuotaReserved (Pending): couldn't assign flavors to pod set main: insufficient unused quota"
    assert look(workloads, 0) == ((said,), [60.0])
    kueue.by_job["a"] = workload(("QuotaReserved", "False", "Inadmissible", "ClusterQueue is stopped"))
    assert "stopped" in look(workloads, 60)[0][0]


def test_a_job_that_runs_is_not_looked_up() -> None:
    kueue, workloads = readers("v1beta2")
    ended = batch_job(conditions=(JobConditionView("Failed"),))
    assert look(workloads, 0, batch_job(suspended=False), ended, batch_job(deleting=True)) == (("", "", ""), [])
    assert kueue.asked == []


def test_a_preemption_is_told_before_what_is_waited_for() -> None:
    kueue, workloads = readers("v1beta2")
    kueue.by_job["a"] = workload(
        ("Evicted", "True", "Preempted", "Preempted to accommodate a workload of higher priority"),
        ("QuotaReserved", "False", "Pending", "Waiting for quota"),
    )
    (said,), _ = look(workloads, 51)
    assert said == (
        "Queue gpus: Evicted (Preempted): Preempted to accommodate a workload of higher priority "
        "QuotaReserved (Pending): Waiting for quota"
    )


def test_an_older_kueue_is_found_and_remembered() -> None:
    kueue, workloads = readers("v1beta1")
    assert "insufficient" in look(workloads, 0)[0][0]
    look(workloads, 15)
    assert kueue.asked == ["v1beta2", "v1beta1", "v1beta1"]


@pytest.mark.parametrize("refusal", [403, 404])
def test_without_kueue_or_the_right_to_ask_it_nothing_is_said_and_rarely_asked(refusal: int) -> None:
    kueue, workloads = readers(refusal=refusal)
    for second in range(0, 299, 15):
        assert look(workloads, second) == (("",), [300.0])
    assert len(kueue.asked) == 2
    look(workloads, 400)
    assert len(kueue.asked) == 4


def test_a_kueue_in_trouble_is_no_trouble_of_the_job() -> None:
    kueue, workloads = readers("v1beta2")
    served, kueue.served, kueue.refusal = kueue.served, (), 500
    assert look(workloads, 0) == (("",), [60.0])
    kueue.served = served
    assert "insufficient" in look(workloads, 15)[0][0]


@pytest.mark.parametrize(("document", "said"), table(__file__, "test_what_a_workload_waits_for"))
def test_what_a_workload_waits_for(document: dict[str, Any], said: str) -> None:
    assert reason_of(document) == said


LOCAL = {"spec": {"clusterQueue": "all"}}
CLUSTER = {"status": {"pendingWorkloads": 3, "conditions": [{"type": "Active", "status": "True"}]}}


class Queues:
    """Answers for the queues of one version. `refused`: plural of what may not be read."""

    def __init__(self, local: Any = LOCAL, cluster: Any = CLUSTER, *, version: str = "v1beta2", refused: str = "") -> None:
        self.objects = {("localqueues", "team", "gpus"): local, ("clusterqueues", None, "all"): cluster}
        self.version, self.refused = version, refused

    async def get(self, kind: Kind, namespace: str | None, name: str) -> dict[str, Any] | None:
        if kind.plural == self.refused:
            raise ApiError("GET", 403, "Forbidden", "queues are not yours to read")
        assert kind.namespaced == (kind.plural == "localqueues")
        found: dict[str, Any] | None = self.objects.get((kind.plural, namespace, name)) if kind.version == self.version else None
        return found


@pytest.mark.parametrize(
    ("queues", "waiting"),
    [
        (Queues(), 3),
        (Queues(cluster={"status": {**CLUSTER["status"], "pendingWorkloads": 0}}), 0),
        (Queues(version="v1beta1"), 3),
        (Queues(version="v9"), None),
        (Queues(refused="localqueues"), None),
        (Queues(refused="clusterqueues"), None),
        (Queues(local=None), None),
        (Queues(local={"spec": {}}), None),
        (Queues(local={"spec": {"clusterQueue": 7}}), None),
        (Queues(cluster=None), None),
        (Queues(cluster={"status": {"pendingWorkloads": 0}}), None),
        (Queues(cluster={"status": {**CLUSTER["status"], "pendingWorkloads": "0"}}), None),
        (Queues(cluster={"status": "none"}), None),
    ],
)
def test_how_many_wait_is_known_only_of_a_queue_that_can_be_read(queues: Any, waiting: int | None) -> None:
    assert asyncio.run(num_waiting(queues, "team", "gpus")) == waiting

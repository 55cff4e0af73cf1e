"""Which Workloads are told of a boost, how rarely, and that a Kueue in trouble is no trouble of the operator."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from structlog.testing import capture_logs

from finetune_job.names import API_VERSION, JOB_KIND, PLAN_KEY, Role, plan_configmap_name
from finetune_job.plan.digest import canonical_json, plan_sha256, text_sha256
from finetune_job.progress import Progress
from finetune_operator.cluster.answers import ApiError, ApiUnreachableError
from finetune_operator.cluster.cache import Cache
from finetune_operator.cluster.checkpoint_boost import PAUSE_SECONDS, PERIOD_SECONDS, CheckpointBoost
from finetune_operator.cluster.kinds import BATCH_JOBS, CONFIG_MAPS, JOBS, PODS, Kind
from finetune_operator.cluster.progress_poll import ProgressPoll
from finetune_operator.cluster.projection import CachedObject
from finetune_operator.decide.children_seen import PodView
from tests.support.builders import a_job
from tests.unit.finetune_operator.cluster import objects
from tests.unit.finetune_operator.cluster.fakes import Clock
from tests.unit.finetune_operator.cluster.test_gather import training

NOW = datetime(2026, 1, 2, 3, 5, tzinfo=UTC)
BOOST = "kueue.x-k8s.io/priority-boost"
RUN, POD = "tune-train-0-uid", "tune-train-0-0-uid"
Document = dict[str, Any]


class Kueue:
    """Workloads by UID of their Job. `trouble`: raised by the next requests of that verb."""

    def __init__(self, *served: str) -> None:
        self.served = served
        self.by_job: dict[str, Document] = {}
        self.requests: list[tuple[str, str, str]] = []
        """Verb, version, and the label's value or the name."""
        self.trouble: dict[str, list[Exception]] = {"list": [], "patch": []}

    def add(self, job_uid: str, boost: str | None = None, uid: str = "workload-uid") -> None:
        annotations = {} if boost is None else {"annotations": {BOOST: boost, "other": "kept"}}
        self.by_job[job_uid] = {"metadata": {"name": f"job-{job_uid}", "uid": uid, **annotations}}

    def boost(self, job_uid: str = RUN) -> str | None:
        found: str | None = self.by_job[job_uid]["metadata"].get("annotations", {}).get(BOOST)
        return found

    def asked(self) -> list[str]:
        """Verbs since the last call."""
        verbs = [verb for verb, _, _ in self.requests]
        self.requests.clear()
        return verbs

    async def list(self, kind: Kind, namespace: str, *, label_selector: str) -> tuple[list[Document], str]:
        assert (kind.group, kind.plural, namespace) == ("kueue.x-k8s.io", "workloads", "team")
        label, _, uid = label_selector.partition("=")
        assert label == "kueue.x-k8s.io/job-uid"
        self._begin("list", kind, uid)
        return ([copy.deepcopy(self.by_job[uid])] if uid in self.by_job else []), "1"

    async def patch(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any]) -> Document:
        assert namespace == "team"
        self._begin("patch", kind, name)
        uid = name.removeprefix("job-")
        if uid not in self.by_job:
            raise ApiError("PATCH", 404, "NotFound", "gone")
        metadata = self.by_job[uid]["metadata"]
        if metadata["uid"] != patch["metadata"]["uid"]:
            raise ApiError("PATCH", 409, "Conflict", "another UID")
        assert set(patch) == {"metadata"}
        assert set(patch["metadata"]) == {"uid", "annotations"}
        metadata["annotations"] = {**metadata.get("annotations", {}), **patch["metadata"]["annotations"]}
        return copy.deepcopy(self.by_job[uid])

    def _begin(self, verb: str, kind: Kind, name: str) -> None:
        self.requests.append((verb, kind.version, name))
        if self.trouble[verb]:
            raise self.trouble[verb].pop(0)
        if kind.version not in self.served:
            raise ApiError(verb, 404, "", "the server could not find the requested resource")


class Pods:
    """Stands for the poll of progress: what the running pod of rank 0 told, by the UID of its FineTuneJob."""

    def __init__(self) -> None:
        self.told: dict[str, Progress | None] = {}
        self.reads = 0

    def rank_zero(self, held: CachedObject) -> PodView | None:
        self.reads += 1
        return PodView("tune-train-0-0", POD, Role.TRAIN, 0, NOW) if held.key.uid in self.told else None

    def progress_of(self, held: CachedObject, pod: PodView) -> Progress | None:
        assert pod.uid == POD
        return self.told[held.key.uid]


def plan_of(most: int, every_steps: int = 100) -> tuple[str, str]:
    """JSON and digest of a frozen plan."""
    plan = a_job().spec("checkpoint", {"everySteps": every_steps}).with_profile(kueue={"checkpointPriorityBoost": most}).plan()
    return canonical_json(plan), plan_sha256(plan)


class Scene:
    """One job that trains under a queue, with a boost of 40 between checkpoints that are 100 steps apart."""

    def __init__(self, most: int = 40, *, served: tuple[str, ...] = ("v1beta2",)) -> None:
        self.kueue = Kueue(*served)
        self.kueue.add(RUN)
        self.cache = Cache(Clock())
        self.pods = Pods()
        self.seconds = 0.0
        self.pauses: list[float] = []
        self.versions = iter(range(1, 1000))
        self.plan_json, self.hash = plan_of(most)
        self.job()
        self.config_map(self.plan_json)
        self.cache.take(BATCH_JOBS, objects.batch_job("preflight", version=next(self.versions)))
        self.run()
        self.at(50)
        self.operator = self.start()

    def start(self) -> CheckpointBoost:
        api: Any = self.kueue

        async def sleep(seconds: float) -> None:
            self.pauses.append(seconds)

        return CheckpointBoost(api, self.cache, self.pods, sleep=sleep, now=lambda: NOW + timedelta(seconds=self.seconds))

    def job(self, uid: str = "job-uid", attempt: int = 0, **status: Any) -> None:
        found = training(attempt) | {"plan": {"hash": self.hash}} | status
        document = objects.finetune_job(next(self.versions), found, uid)
        document["metadata"]["name"] = "tune" if uid == "job-uid" else uid
        self.cache.take(JOBS, document)

    def config_map(self, text: str, uid: str = "plan-uid", job_uid: str = "job-uid") -> None:
        name = plan_configmap_name("tune" if job_uid == "job-uid" else job_uid)
        references = [objects.owner(JOB_KIND, "tune", job_uid, API_VERSION)]
        metadata = objects.metadata(name, uid, next(self.versions), labels=objects.labels("plan", 0), ownerReferences=references)
        self.cache.take(CONFIG_MAPS, {"metadata": metadata, "data": {PLAN_KEY: text}})

    def replace_plan(self, text: str) -> None:
        """Somebody deletes the ConfigMap and makes another."""
        self.cache.bury(CONFIG_MAPS, self.cache.owned(CONFIG_MAPS, "job-uid")[0])
        self.config_map(text, f"plan-{next(self.versions)}")

    def run(self, attempt: int = 0, job_uid: str = "job-uid", *, uid: str = "", suspend: bool = False, **more: Any) -> None:
        document = objects.batch_job(attempt=attempt, version=next(self.versions), spec={"suspend": suspend}, **more)
        document["metadata"]["uid"] = uid or document["metadata"]["uid"]
        document["metadata"]["ownerReferences"][0]["uid"] = job_uid
        self.cache.take(BATCH_JOBS, document)

    def at(self, step: int, checkpoint: int | None = None, job_uid: str = "job-uid") -> None:
        self.pods.told[job_uid] = Progress(attempt=0, step=step, total_steps=1000, checkpoint_step=checkpoint)

    def round(self, seconds: float = PERIOD_SECONDS) -> list[str]:
        """One round so many seconds after the one before. Returns what was requested."""
        self.seconds += seconds
        asyncio.run(self.operator._round())
        return self.kueue.asked()


@pytest.fixture(name="scene")
def a_scene() -> Scene:
    return Scene()


def conditions(**states: str) -> list[Document]:
    return [{"type": kind, "status": state} for kind, state in states.items()]


def test_the_boost_follows_the_run_from_checkpoint_to_checkpoint(scene: Scene) -> None:
    assert (scene.round(), scene.kueue.boost()) == (["list", "patch"], "20")
    scene.at(75)
    assert (scene.round(), scene.kueue.boost()) == (["patch"], "30")
    scene.at(103)
    assert (scene.round(), scene.kueue.boost()) == (["patch"], "40")
    scene.at(104, checkpoint=100)
    assert (scene.round(), scene.kueue.boost()) == (["patch"], "0")


def test_a_run_that_continues_in_its_pod_keeps_its_boost(scene: Scene) -> None:
    scene.round()
    scene.job(attempt=1, attempts=[{"role": "train", "number": 0, "continued": True}])
    scene.at(75)
    assert (scene.round(), scene.kueue.boost()) == (["patch"], "30")
    # One that runs elsewhere is told nothing for the Job of before.
    scene.job(attempt=2, attempts=[{"role": "train", "number": 0, "continued": True}])
    scene.at(100)
    assert scene.round() == []


def test_what_stands_there_is_not_written_again(scene: Scene) -> None:
    scene.round()
    scene.at(51)
    assert [scene.round() for _ in range(50)] == [[]] * 50


@pytest.mark.parametrize("stands", ["20", "0", None])
def test_an_operator_that_begins_finds_what_stands_there(scene: Scene, stands: str | None) -> None:
    scene.kueue.add(RUN, stands)
    scene.at(50 if stands == "20" else 0)
    assert scene.round() == ["list"]
    assert scene.kueue.boost() == stands
    assert scene.round() == []


@pytest.mark.parametrize("odd", ["", "+20", "much", "020", "-5", "9" * 400])
def test_another_boost_is_replaced_and_other_annotations_stay(scene: Scene, odd: str) -> None:
    scene.kueue.add(RUN, odd)
    assert scene.round() == ["list", "patch"]
    assert scene.kueue.by_job[RUN]["metadata"]["annotations"] == {BOOST: "20", "other": "kept"}


def test_without_progress_of_the_running_pod_nothing_is_asked_and_what_stands_there_stays(scene: Scene) -> None:
    scene.kueue.add(RUN, "30")
    scene.pods.told["job-uid"] = None
    assert (scene.round(), scene.kueue.boost()) == ([], "30")


@pytest.mark.parametrize("is_running", [True, False], ids=["its pods still end", "its pods are gone"])
def test_a_preempted_job_waits_without_a_boost(scene: Scene, is_running: bool) -> None:
    scene.round()
    scene.run(suspend=True)
    if not is_running:
        scene.pods.told.clear()
    assert (scene.round(), scene.kueue.boost()) == (["patch"], "0")


def test_pods_that_start_again_have_nothing_to_lose(scene: Scene) -> None:
    scene.round()
    scene.pods.told.clear()
    assert (scene.round(), scene.kueue.boost()) == (["patch"], "0")


def test_each_attempt_has_a_workload_of_its_own(scene: Scene) -> None:
    scene.round()
    scene.kueue.add("tune-train-1-uid")
    scene.run(1)
    scene.job(attempt=1)
    scene.at(100)
    assert scene.round() == ["list", "patch"]
    assert (scene.kueue.boost(), scene.kueue.boost("tune-train-1-uid")) == ("20", "40")
    assert list(scene.operator._told) == ["tune-train-1-uid"]


@pytest.mark.parametrize("most", [0, 40])
def test_where_no_plan_asks_for_it_there_is_no_request(most: int) -> None:
    scene = Scene(most)
    assert scene.round() == ([] if most == 0 else ["list", "patch"])
    assert scene.pods.reads == (0 if most == 0 else 1)


def test_a_release_that_writes_out_that_nothing_is_asked_for_is_understood(scene: Scene) -> None:
    plan = json.loads(scene.plan_json)
    plan["placement"]["checkpoint_priority_boost"] = 0
    text = json.dumps(plan)
    scene.hash = text_sha256(text)
    scene.job()
    scene.replace_plan(text)
    assert [scene.round(), scene.round()] == [[], []]


@pytest.fixture(name="reads")
def what_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """UIDs of what was taken out of the cache's compressed documents."""
    reads: list[str] = []
    read = CachedObject.document
    monkeypatch.setattr(CachedObject, "document", lambda held: (reads.append(held.key.uid), read(held))[1])
    return reads


def test_of_a_job_whose_plan_does_not_ask_for_it_only_the_plan_is_read(reads: list[str]) -> None:
    scene = Scene(0)
    for _ in range(20):
        scene.round()
    assert reads == ["plan-uid"]


def test_a_plan_is_read_once(scene: Scene, reads: list[str]) -> None:
    for step in range(0, 100, 5):
        scene.at(step)
        scene.round()
    assert reads == ["plan-uid", "job-uid"]
    scene.cache.bury(CONFIG_MAPS, scene.cache.owned(CONFIG_MAPS, "job-uid")[0])
    assert scene.round() == [], "no plan, no request"


@pytest.mark.parametrize("text", ["forged", "", '{"checkpoint_priority_boost": 1}'])
def test_a_plan_that_is_not_the_frozen_one_asks_for_nothing(scene: Scene, text: str) -> None:
    scene.replace_plan(plan_of(1_000_000)[0] if text == "forged" else text)
    assert [scene.round(), scene.round()] == [[], []]
    scene.replace_plan(scene.plan_json)
    assert (scene.round(), scene.kueue.boost()) == (["list", "patch"], "20")


@pytest.mark.parametrize(
    "states",
    [{"Prepared": "False"}, {"Prepared": "True", "Trained": "True"}, {"Prepared": "True", "Finished": "True"}],
    ids=["not prepared", "trained", "finished"],
)
def test_a_job_that_does_not_train_is_left_alone_and_forgotten(scene: Scene, states: dict[str, str]) -> None:
    scene.round()
    scene.job(conditions=conditions(**states))
    scene.at(100)
    assert scene.round() == []
    assert (scene.operator._wishes, scene.operator._told) == ({}, {})


@pytest.mark.parametrize("ended", ["Complete", "Failed", "deleting", "gone"])
def test_a_train_job_that_has_ended_is_left_alone(scene: Scene, ended: str) -> None:
    if ended == "gone":
        for held in scene.cache.owned(BATCH_JOBS, "job-uid"):
            scene.cache.bury(BATCH_JOBS, held)
    elif ended == "deleting":
        document = objects.batch_job(version=99)
        document["metadata"]["deletionTimestamp"] = objects.CREATED
        scene.cache.take(BATCH_JOBS, document)
    else:
        scene.run(status={"conditions": conditions(**{ended: "True"})})
    assert scene.round() == []


def test_jobs_that_are_gone_are_forgotten(scene: Scene) -> None:
    scene.job("second")
    scene.config_map(scene.plan_json, "plan-2", "second")
    scene.run(job_uid="second", uid="without-workload")
    scene.at(50, job_uid="second")
    scene.round()
    assert (set(scene.operator._told), set(scene.operator._absent_until)) == ({RUN}, {"without-workload"})
    for held in scene.cache.jobs():
        scene.cache.bury(JOBS, held)
    scene.round()
    operator = scene.operator
    assert (operator._wishes, operator._told, operator._absent_until) == ({}, {}, {})


def test_an_older_kueue_is_patched_in_its_own_version() -> None:
    scene = Scene(served=("v1beta1",))
    asyncio.run(scene.operator._round())
    assert [(verb, version) for verb, version, _ in scene.kueue.requests] == [
        ("list", "v1beta2"),
        ("list", "v1beta1"),
        ("patch", "v1beta1"),
    ]
    assert scene.kueue.boost() == "20"


def counted(scene: Scene, until: float, step: int = 50) -> list[float]:
    """When there were requests, in seconds since the first round, while the boost changes every time."""
    begun, times = scene.seconds + PERIOD_SECONDS, []
    while scene.seconds - begun < until:
        step = 150 - step
        scene.at(step)
        if scene.round():
            times.append(scene.seconds - begun)
    return times


def test_a_job_without_a_workload_is_asked_for_every_five_minutes(scene: Scene) -> None:
    del scene.kueue.by_job[RUN]
    assert counted(scene, 900) == [0, 300, 600, 900]
    scene.kueue.add(RUN)
    assert counted(scene, 300)[0] == 285
    assert scene.kueue.boost() is not None


@pytest.mark.parametrize("code", [403, 404])
def test_without_kueue_or_the_right_to_read_it_it_is_asked_every_five_minutes(code: int) -> None:
    scene = Scene(served=())
    scene.kueue.trouble["list"] = [ApiError("LIST", code, "", "") for _ in range(4)]
    assert counted(scene, 300) == [0, 300]


def test_without_the_right_to_write_the_fix_is_told_once_and_it_is_tried_every_five_minutes(scene: Scene) -> None:
    scene.kueue.trouble["patch"] = [ApiError("PATCH", 403, "Forbidden", "cannot patch workloads") for _ in range(3)]
    with capture_logs() as logs:
        times = counted(scene, 600)
    assert times == [0, 300, 600]
    (said,) = logs
    assert "kueue.patchWorkloads=true" in said["fix"]
    assert counted(scene, 300)[0] == 285, "and then it may"
    assert scene.operator._refused_until == {}
    scene.kueue.trouble["patch"] = [ApiError("PATCH", 403, "Forbidden", "no more")]
    with capture_logs() as logs:
        counted(scene, 30)
    assert len(logs) == 1, "a right that was taken away is news"


def test_a_refusal_in_one_namespace_does_not_silence_others(scene: Scene) -> None:
    scene.operator._refused_until["another"] = NOW + timedelta(days=1)
    scene.round()
    assert scene.kueue.boost() == "20"


@pytest.mark.parametrize("end", ["gone", "replaced"])
def test_a_workload_that_is_gone_or_replaced_is_looked_for_again(scene: Scene, end: str) -> None:
    scene.round()
    scene.at(75)
    if end == "gone":
        scene.kueue.trouble["patch"] = [ApiError("PATCH", 404, "NotFound", "gone")]
    scene.kueue.add(RUN, uid="another")
    with capture_logs() as logs:
        assert scene.round() == ["patch"]
    assert (logs, scene.kueue.boost()) == ([], None)
    assert (scene.round(), scene.kueue.boost()) == (["list", "patch"], "30")


@pytest.mark.parametrize(("verb", "code"), [("list", 500), ("patch", 500), ("patch", 422)])
def test_a_kueue_in_trouble_is_told_once_a_round_and_holds_no_other_job_up(scene: Scene, verb: str, code: int) -> None:
    for number in range(3):
        job_uid, run_uid = f"job-{number}", f"run-{number}"
        scene.job(job_uid)
        scene.config_map(scene.plan_json, f"plan-{number}", job_uid)
        scene.run(job_uid=job_uid, uid=run_uid)
        scene.kueue.add(run_uid)
        scene.at(50, job_uid=job_uid)
    scene.kueue.trouble[verb] = [ApiError(verb, code, "", "failed calling webhook") for _ in range(2)]
    with capture_logs() as logs:
        scene.round()
    assert [(entry["workloads"], "webhook" in entry["error"]) for entry in logs] == [(2, True)]
    boosts = [scene.kueue.boost(uid) for uid in scene.kueue.by_job]
    assert sorted(boosts, key=str) == ["20", "20", None, None]
    scene.round()
    assert {scene.kueue.boost(uid) for uid in scene.kueue.by_job} == {"20"}


def test_a_server_that_is_away_ends_the_round_and_what_is_known_stays(scene: Scene) -> None:
    scene.round()
    scene.at(75)
    scene.kueue.trouble["patch"] = [ApiUnreachableError("away")]
    with pytest.raises(ApiUnreachableError):
        scene.round()
    scene.kueue.asked()
    assert (scene.round(), scene.kueue.boost()) == (["patch"], "30")


def test_there_is_a_pause_after_each_workload_and_between_rounds(scene: Scene) -> None:
    scene.job("second")
    scene.config_map(scene.plan_json, "plan-2", "second")
    scene.run(job_uid="second", uid="without-workload")
    scene.at(50, job_uid="second")

    def ends() -> Iterator[None]:
        yield from [None] * 3
        raise ApiUnreachableError("enough")

    ending = ends()

    async def sleep(seconds: float) -> None:
        scene.pauses.append(seconds)
        next(ending)

    scene.operator._sleep = sleep
    with pytest.raises(ApiUnreachableError):
        asyncio.run(scene.operator.run())
    assert scene.pauses == [PAUSE_SECONDS, PAUSE_SECONDS, PERIOD_SECONDS, PERIOD_SECONDS]


def test_the_pod_and_its_progress_come_from_the_poll() -> None:
    scene = Scene()
    gatherer: Any = None
    poll = ProgressPoll(scene.cache, gatherer, lambda _: None, period=1.0, longest=1.0, writes_per_second=1.0)
    (held,) = scene.cache.jobs()
    assert poll.rank_zero(held) is None
    scene.cache.take(PODS, objects.pod(status={"phase": "Running", "podIP": "10.0.0.1"}, version=500))
    pod = poll.rank_zero(held)
    assert pod is not None
    assert (pod.uid, poll.progress_of(held, pod)) == (POD, None)

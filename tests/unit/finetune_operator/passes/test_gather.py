import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from finetune_job.names import API_VERSION, JOB_KIND
from finetune_job.progress import Progress
from finetune_operator.cache.cache import Cache
from finetune_operator.cache.projection import project
from finetune_operator.cache.warning_events import WarningEvents
from finetune_operator.client.answers import ApiError
from finetune_operator.client.kinds import (
    BATCH_JOBS,
    CLAIMS,
    CONFIG_MAPS,
    JOBS,
    NAMESPACES,
    NODES,
    PODS,
    PROFILES,
    SERVICES,
    JobKey,
    Kind,
)
from finetune_operator.decide.seen.observed import NamespaceView
from finetune_operator.passes import gather as module
from finetune_operator.passes.gather import CLAIM_SEEN_SECONDS, MISSING_RETRY_SECONDS, Gathered, Gatherer
from finetune_operator.passes.live_reads import namespace_view
from tests.unit.finetune_operator import objects
from tests.unit.finetune_operator.fakes import Clock, FakeApi

KEY = JobKey("team", "tune")
NOW = datetime(2026, 1, 2, 3, 5, tzinfo=UTC)
PLAN = {"hash": "h"}
ENDED = {"type": "Succeeded", "status": "False", "reason": "Failed", "lastTransitionTime": objects.CREATED}


class Scene:
    def __init__(self, **job: Any) -> None:
        """With a job of this status and spec."""
        self.api: Any = FakeApi()
        self.cache = Cache(Clock())
        self.warnings = WarningEvents(self.cache)
        self.gatherer = Gatherer(self.api, self.cache, 5.0, self.warnings)
        self.add(JOBS, objects.finetune_job(**job))

    def add(self, kind: Kind, document: dict[str, Any], *, seen: bool = True) -> None:
        made = self.api.put(kind, document)
        if seen:
            self.cache.take(kind, made)

    def gather(self, now: datetime = NOW) -> Gathered:
        self.api.calls.clear()
        return asyncio.run(self.gatherer.gather(KEY, now))


def claim(name: str) -> dict[str, Any]:
    return {"metadata": objects.metadata(name, f"{name}-uid")}


def training(attempt: int) -> dict[str, Any]:
    done = [
        {"type": kind, "status": "True", "reason": "Completed", "lastTransitionTime": objects.CREATED}
        for kind in ("Fetched", "Prepared")
    ]
    return {"startTime": objects.CREATED, "plan": PLAN, "attempt": attempt, "conditions": done}


def test_absent_job_gives_nothing() -> None:
    assert asyncio.run(Scene().gatherer.gather(JobKey("team", "absent"), NOW)) is None


def test_malformed_spec_is_reported_field_by_field() -> None:
    scene = Scene(model={"source": "nowhere"})
    job = scene.gather().observed.job
    assert job.spec is None
    assert "spec.model.source" in job.spec_error


def test_profile_missing_malformed_and_good() -> None:
    scene = Scene()
    assert scene.gather().observed.profile.spec is None
    profile = {"metadata": {"name": "default", "uid": "p"}, "spec": {"trainerImage": ""}}
    scene.add(PROFILES, profile)
    observed = scene.gather().observed.profile
    assert (observed.spec, "trainerImage" in observed.error) == (None, True)
    scene.add(PROFILES, {"metadata": {"name": "default", "uid": "p"}, "spec": {"trainerImage": "image:1"}})
    good = scene.gather().observed.profile
    assert good.spec is not None
    assert good.error == ""


def test_labels_of_the_namespace_are_read_for_a_profile_that_asks_until_something_has_begun() -> None:
    scene = Scene()
    profile = {"metadata": {"name": "default", "uid": "p"}, "spec": {"trainerImage": "image:1"}}
    scene.add(PROFILES, profile)
    assert scene.gather().observed.namespace is None
    scene.add(PROFILES, {**profile, "spec": {**profile["spec"], "namespaceSelector": {}}})
    assert scene.gather().observed.namespace == NamespaceView(error="it does not exist")
    scene.add(NAMESPACES, {"metadata": {"name": "team", "labels": {"gpu": "yes", "odd": 1}}}, seen=False)
    assert scene.gather(NOW + timedelta(seconds=1)).observed.namespace == NamespaceView(error="it does not exist"), (
        "as read before"
    )
    assert scene.gather(NOW + timedelta(seconds=2)).observed.namespace == NamespaceView({"gpu": "yes"})
    scene.api.fail["get"] = [ApiError("GET /api/v1/namespaces/team", 403, "Forbidden", "may not")]
    refused = asyncio.run(namespace_view(scene.api, "team"))
    assert refused == NamespaceView(error="it has no permission to get namespaces: may not")
    scene.api.fail["get"] = [ApiError("GET /api/v1/namespaces/team", 500, "InternalError", "down")]
    with pytest.raises(ApiError):
        asyncio.run(namespace_view(scene.api, "team"))
    scene.add(JOBS, objects.finetune_job(status=training(attempt=0)))
    assert scene.gather(NOW + timedelta(seconds=60)).observed.namespace is None


def test_claims_are_asked_for_until_seen_and_again_after_a_while() -> None:
    scene = Scene()
    for name in ("models", "data", "workspace"):
        scene.add(CLAIMS, claim(name), seen=False)
    first = scene.gather()
    assert first.observed.claims == {"models", "data", "workspace"}
    assert first.revisit_after_seconds is not None
    scene.add(CLAIMS, claim("results"), seen=False)
    second = scene.gather()
    assert [name for verb, _, name in scene.api.calls if verb == "get"] == ["results"]
    assert len(second.observed.claims) == 4
    assert second.revisit_after_seconds is None
    del scene.api.objects["PersistentVolumeClaim", "team", "models"]
    assert "models" in scene.gather().observed.claims
    assert "models" not in scene.gather(NOW + timedelta(seconds=CLAIM_SEEN_SECONDS + 1)).observed.claims
    assert ("team", "models") not in scene.gatherer._claims_seen


def workspace_claim(owner_uid: str = "", **metadata: Any) -> dict[str, Any]:
    owners = [objects.owner("FineTuneJob", "tune", owner_uid, "finetune.dev/v1alpha1")] if owner_uid else []
    labels = {"app.kubernetes.io/managed-by": "finetune-operator", "finetune.dev/job": "tune"}
    made = objects.metadata("tune-workspace", "workspace-uid", labels=labels, ownerReferences=owners, **metadata)
    return {"metadata": made}


def test_template_claim_of_an_earlier_job_vanishes_and_is_not_remembered() -> None:
    scene = Scene(workspace={"volumeClaimTemplate": {"storage": "10Gi"}})
    for name in ("models", "data", "results"):
        scene.add(CLAIMS, claim(name), seen=False)
    scene.add(CLAIMS, workspace_claim("earlier-uid"), seen=False)
    for _ in range(2):
        gathered = scene.gather()
        assert gathered.observed.vanishing == ("PersistentVolumeClaim/tune-workspace",)
        assert gathered.observed.claims == {"models", "data", "results"}
        assert gathered.revisit_after_seconds == 3.0
    del scene.api.objects["PersistentVolumeClaim", "team", "tune-workspace"]
    observed = scene.gather().observed
    assert (observed.vanishing, observed.claims) == ((), {"models", "data", "results"})
    # One that is kept, but that somebody deletes a moment later.
    for deleted in ({}, {"deletionTimestamp": objects.CREATED}):
        scene.add(CLAIMS, workspace_claim(**deleted), seen=False)
        observed = scene.gather().observed
        assert ("tune-workspace" in observed.claims, bool(observed.vanishing)) == (not deleted, bool(deleted))


def test_template_claim_that_the_job_works_on_is_there_until_it_is_gone() -> None:
    scene = Scene()
    template = {"volumeClaimTemplate": {"storage": "10Gi"}}
    scene.add(JOBS, objects.finetune_job(status=training(attempt=0), workspace=template))
    scene.add(BATCH_JOBS, objects.batch_job())
    scene.add(CLAIMS, workspace_claim("job-uid", deletionTimestamp=objects.CREATED), seen=False)
    observed = scene.gather().observed
    assert (observed.vanishing, observed.claims) == ((), {"tune-workspace"})
    # The claim of another job of that name is another claim, even a moment later.
    scene.cache.bury(JOBS, scene.cache.job(KEY))
    scene.add(JOBS, objects.finetune_job(uid="next-uid", workspace=template))
    observed = scene.gather().observed
    assert (observed.vanishing, observed.claims) == (("PersistentVolumeClaim/tune-workspace",), frozenset())


def pod_named(name: str, owner: dict[str, Any] | None, **labels: str) -> dict[str, Any]:
    pod = objects.pod(attempt=0, status={"phase": "Running"})
    pod["metadata"] |= {"name": name, "uid": name, "ownerReferences": [] if owner is None else [owner], "labels": labels}
    return pod


def test_live_lists_show_what_runs_of_the_job_whatever_its_labels_are() -> None:
    scene = Scene(status=training(attempt=1))
    (reference,) = objects.batch_job()["metadata"]["ownerReferences"]
    changes = ({}, {"uid": "another-job"}, {"apiVersion": "example.dev/v1"}, {"kind": "Workflow"}, {"controller": False})
    for number, change in enumerate(changes):
        job = objects.batch_job(attempt=0)
        job["metadata"] |= {
            "name": f"job-{number}",
            "uid": f"job-{number}",
            "labels": {},
            "ownerReferences": [reference | change],
        }
        scene.add(BATCH_JOBS, job, seen=False)
    its_job, gone_job = (objects.owner("Job", name, name, "batch/v1") for name in ("job-0", "gone"))
    ours = objects.labels("train", 0)
    scene.add(PODS, pod_named("unlabelled", its_job), seen=False)
    scene.add(PODS, pod_named("ended", its_job) | {"status": {"phase": "Failed"}}, seen=False)
    scene.add(PODS, pod_named("of-a-job-that-is-gone", gone_job, **ours), seen=False)
    scene.add(PODS, pod_named("orphan", None, **ours), seen=False)
    scene.add(PODS, pod_named("of-a-replica-set", objects.owner("ReplicaSet", "web", "web", "apps/v1"), **ours), seen=False)
    live = scene.gather().observed.live
    assert [job.name for job in live.batch_jobs] == ["job-0"]
    pods = {pod.name: pod.orphaned for pod in live.running_pods}
    assert pods == {"unlabelled": False, "of-a-job-that-is-gone": False, "orphan": True}


def test_no_live_lists_without_need() -> None:
    scene = Scene(status=training(attempt=0))
    assert scene.gather().observed.live is None
    assert "list" not in [verb for verb, _, _ in scene.api.calls]


def warning(kind: str, uid: str, reason: str, message: str, namespace: str = "team") -> dict[str, Any]:
    return {
        "metadata": {"name": "e", "namespace": namespace},
        "type": "Warning",
        "involvedObject": {"kind": kind, "uid": uid, "namespace": namespace},
        "reason": reason,
        "message": message,
        "lastTimestamp": objects.CREATED,
    }


def test_events_of_pods_that_stay_pending_are_reported_without_a_read() -> None:
    scene = Scene(status=training(attempt=0))
    scene.add(BATCH_JOBS, objects.batch_job())
    scene.add(PODS, objects.pod())
    created = datetime.fromisoformat(objects.CREATED)
    assert scene.gather(created + timedelta(seconds=60)).revisit_after_seconds == MISSING_RETRY_SECONDS  # for the claims only
    assert scene.warnings.take(warning("Pod", "tune-train-0-0-uid", "FailedMount", 'secret "s" not found')) == KEY
    young = scene.gather(created + timedelta(seconds=1))
    assert young.observed.pods[0].events == ()
    assert young.revisit_after_seconds <= 4.2
    old = scene.gather(created + timedelta(seconds=6))
    assert old.observed.pods[0].events == ('FailedMount: secret "s" not found',)
    assert "Event" not in [kind for _, kind, _ in scene.api.calls]
    scene.add(PODS, objects.pod(status={"phase": "Running"}))
    assert scene.gather(created + timedelta(seconds=7)).observed.pods[0].events == ()


def test_events_of_a_job_whose_pods_may_not_be_created_are_reported() -> None:
    scene = Scene(status=training(attempt=0))
    scene.add(BATCH_JOBS, objects.batch_job())
    scene.warnings.take(warning("Job", "tune-train-0-uid", "FailedCreate", "exceeded quota: pods"))
    assert scene.gather().observed.batch_jobs[0].events == ("FailedCreate: exceeded quota: pods",)


def test_evidence_stays_while_its_attempt_is_current_and_goes_after() -> None:
    scene = Scene(status=training(attempt=0))
    scene.add(BATCH_JOBS, objects.batch_job())
    for kind, document in ((PODS, objects.pod(version=100)), (BATCH_JOBS, objects.batch_job(version=101))):
        document["metadata"]["deletionTimestamp"] = objects.CREATED
        scene.cache.remove(kind, project(kind, document))
    assert [pod.gone for pod in scene.gather().observed.pods] == [True]
    scene.add(JOBS, objects.finetune_job(status=training(attempt=1)))
    assert scene.gather().observed.pods == ()


def test_pods_of_an_earlier_job_of_the_same_name_say_nothing_of_the_one_that_is_there() -> None:
    """Somebody has deleted the Job before anything was known of it, so that it was made again under its number."""
    scene = Scene(status=training(attempt=0))
    scene.add(BATCH_JOBS, objects.batch_job())
    scene.add(PODS, objects.pod())
    scene.cache.found_gone(BATCH_JOBS, "tune-train-0-uid")
    assert [pod.uid for pod in scene.gather().observed.pods] == ["tune-train-0-0-uid"]
    again, pod = objects.batch_job(), objects.pod()
    again["metadata"]["uid"] = pod["metadata"]["ownerReferences"][0]["uid"] = "again"
    pod["metadata"]["uid"] = "its pod"
    scene.add(BATCH_JOBS, again)
    assert scene.gather().observed.pods == ()
    scene.add(PODS, pod)
    assert [pod.uid for pod in scene.gather().observed.pods] == ["its pod"]


def test_progress_is_handed_out_once() -> None:
    scene = Scene(status=training(attempt=0))
    scene.gatherer.note_progress("job-uid", Progress(attempt=0, step=1, total_steps=4))
    assert scene.gather().observed.progress is not None
    assert scene.gather().observed.progress is None


def test_what_was_noted_of_a_job_goes_with_it() -> None:
    scene = Scene()
    scene.gatherer.note_progress("job-uid", Progress(attempt=0, step=1, total_steps=4))
    scene.gatherer.note_conflict("job-uid", BATCH_JOBS, "tune-train-0")
    assert list(scene.gatherer._notes) == ["job-uid"]
    scene.cache.remove(JOBS, scene.cache.job(KEY))
    assert scene.gatherer._notes == {}
    # A rank that answers late, and a create that comes back late.
    scene.gatherer.note_progress("job-uid", Progress(attempt=0, step=2, total_steps=4))
    scene.gatherer.note_written("job-uid")
    assert scene.gatherer._notes == {}


def test_nothing_is_kept_of_a_job_once_there_is_nothing_to_note() -> None:
    scene = Scene()
    assert scene.gatherer.may_create("job-uid", NOW)
    scene.gatherer.note_written("job-uid")
    assert scene.gatherer._notes == {}
    scene.gather()
    assert scene.gatherer._notes == {}
    scene.gatherer.note_progress("job-uid", Progress(attempt=0, step=1, total_steps=4))
    scene.gather()
    assert scene.gatherer._notes == {}


def test_notes_of_a_refusal_stay_until_a_write_has_succeeded() -> None:
    scene = Scene()
    scene.gatherer.note_refusal("job-uid", BATCH_JOBS, "tune-train-0", ApiError("POST", 403, "Forbidden", "exceeded quota"), NOW)
    assert scene.gather().observed.refused is not None
    assert not scene.gatherer.may_create("job-uid", NOW)
    scene.gatherer.note_written("job-uid")
    assert scene.gather().observed.refused is None
    assert scene.gatherer._notes == {}


@pytest.mark.parametrize(("owner", "pause"), [("another", 15.0), ("tune", 3.0)])
def test_conflict_is_looked_at_in_each_pass_until_it_is_gone(owner: str, pause: float) -> None:
    scene = Scene()
    for name in ("models", "data", "workspace", "results"):
        scene.add(CLAIMS, claim(name), seen=False)
    foreign = objects.batch_job()
    foreign["metadata"]["ownerReferences"][0] |= {"name": owner, "uid": "earlier-job"}
    scene.add(BATCH_JOBS, foreign, seen=False)
    scene.gatherer.note_conflict("job-uid", BATCH_JOBS, "tune-train-0")
    for _ in range(3):
        gathered = scene.gather()
        assert gathered.observed.vanishing + gathered.observed.conflicts == ("Job/tune-train-0",)
        assert gathered.revisit_after_seconds == pause
        assert not scene.gatherer.may_create("job-uid", NOW)
    del scene.api.objects["Job", "team", "tune-train-0"]
    gathered = scene.gather()
    assert gathered.observed.vanishing + gathered.observed.conflicts == ()
    assert gathered.revisit_after_seconds is None
    assert scene.gatherer.may_create("job-uid", NOW)


def test_nothing_is_listed_while_a_name_is_taken_but_for_the_end() -> None:
    """Nothing is created meanwhile, and the name may stay taken for weeks."""
    scene = Scene(status=training(attempt=1))
    stranger = objects.batch_job(attempt=1)
    stranger["metadata"]["ownerReferences"][0] |= {"name": "another", "uid": "another-job"}
    scene.add(BATCH_JOBS, stranger, seen=False)
    scene.gatherer.note_conflict("job-uid", BATCH_JOBS, "tune-train-1")
    seen = scene.gather().observed
    assert (seen.conflicts, seen.live) == (("Job/tune-train-1",), None)
    ended = training(attempt=1)
    ended["conditions"].append(ENDED)
    scene.add(JOBS, objects.finetune_job(status=ended))
    assert scene.gather().observed.live is not None
    scene.add(JOBS, objects.finetune_job(status=training(attempt=1)))
    del scene.api.objects["Job", "team", "tune-train-1"]
    assert scene.gather().observed.live is not None


def test_the_plan_is_found_by_its_name() -> None:
    scene = Scene()
    references = objects.batch_job()["metadata"]["ownerReferences"]
    for name, text in (("another", "no"), ("tune-plan", "plan")):
        metadata = objects.metadata(name, f"{name}-uid", labels=objects.labels("train", 2), ownerReferences=references)
        scene.add(CONFIG_MAPS, {"metadata": metadata, "data": {"plan.json": text}})
    observed = scene.gather().observed
    assert (observed.plan.name, observed.plan.plan_json) == ("tune-plan", "plan")


def test_service_of_the_gang_is_the_one_of_that_name_that_the_job_owns() -> None:
    scene = Scene()
    references, labels = objects.batch_job()["metadata"]["ownerReferences"], objects.labels("train", 0)
    extra = objects.metadata("extra", "extra-uid", labels=labels, ownerReferences=references)
    scene.add(SERVICES, {"metadata": extra})
    scene.add(SERVICES, {"metadata": objects.metadata("tune-gang", "foreign-uid", labels=labels)})
    observed = scene.gather().observed
    assert (observed.service_uid, observed.service_exists) == ("", False)
    scene.add(SERVICES, {"metadata": extra | {"name": "tune-gang", "uid": "gang-uid"}})
    observed = scene.gather().observed
    assert (observed.service_uid, observed.service_exists) == ("gang-uid", True)


@pytest.mark.parametrize(
    ("status", "is_ours", "is_found", "reads"),
    [
        (training(1), True, True, 1),
        (training(1), False, False, 1),
        ({"startTime": objects.CREATED, "plan": PLAN}, True, False, 0),
        ({**training(1), "conditions": [ENDED]}, True, False, 0),
    ],
)
def test_a_plan_that_lost_its_label_before_the_first_list_is_found_by_its_name(
    status: dict[str, Any], is_ours: bool, is_found: bool, reads: int
) -> None:
    scene = Scene(status=status)
    references = [objects.owner(JOB_KIND, "tune", "job-uid" if is_ours else "another-uid", API_VERSION)]
    document = {"metadata": objects.metadata("tune-plan", "plan-uid", ownerReferences=references), "data": {"plan.json": "{}"}}
    scene.add(CONFIG_MAPS, document, seen=False)
    found = scene.gather()
    assert (found.observed.plan is not None) is is_found
    assert scene.api.calls.count(("get", "ConfigMap", "tune-plan")) == reads
    for _ in range(2):
        scene.gather()
    assert scene.api.calls.count(("get", "ConfigMap", "tune-plan")) == (0 if is_found else reads)


@pytest.mark.parametrize(("queue", "waiting"), [("gpus", 2), (None, None)])
def test_a_queue_is_asked_only_for_a_gang_that_would_grow(
    monkeypatch: pytest.MonkeyPatch, queue: str | None, waiting: int | None
) -> None:
    async def num_waiting(api: Any, namespace: str, name: str) -> int:
        assert (api, namespace, name) == (scene.api, "team", "gpus")
        return 2

    monkeypatch.setattr(module, "queue_of_growth", lambda observed, now: queue if now == NOW else None)
    monkeypatch.setattr(module, "num_waiting", num_waiting)
    scene = Scene()
    assert scene.gather().observed.waiting_in_queue == waiting


@pytest.mark.parametrize("names", [(), ("node-a",)])
def test_nodes_are_read_only_if_a_failure_on_them_is_in_question(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
    monkeypatch.setattr(module, "nodes_in_question", lambda _: names)
    scene = Scene()
    scene.add(NODES, {"metadata": {"name": "node-a"}, "status": {}}, seen=False)
    observed = scene.gather().observed
    assert [node.name for node in observed.nodes] == [name for _, kind, name in scene.api.calls if kind == "Node"] == [*names]

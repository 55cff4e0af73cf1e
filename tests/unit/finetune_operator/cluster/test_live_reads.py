"""What no watch shows: children without their label, children in doubt, and the live lists before a later attempt."""

from datetime import datetime, timedelta
from typing import Any

import pytest

from finetune_job.names import INDEX_LABEL
from finetune_operator.cluster.answers import ApiUnreachableError
from finetune_operator.cluster.kinds import BATCH_JOBS, CONFIG_MAPS, JOBS, NETWORK_POLICIES, PODS, Kind
from finetune_operator.cluster.live_reads import LISTED_SECONDS, UNWATCHED_SECONDS
from finetune_operator.decide.children_seen import PolicyView
from tests.unit.finetune_operator.cluster import objects
from tests.unit.finetune_operator.cluster.test_gather import NOW, Scene, training


def unlabelled(document: dict[str, Any]) -> dict[str, Any]:
    return document | {"metadata": document["metadata"] | {"labels": {}}}


def takes_label_off(scene: Scene, kind: Kind, document: dict[str, Any]) -> None:
    """The API server has it without the label; the watch says DELETED at that version, with the state before."""
    stored = scene.api.put(kind, unlabelled(document))
    before = document | {"metadata": document["metadata"] | {"resourceVersion": stored["metadata"]["resourceVersion"]}}
    held = scene.cache.read(kind, before)
    assert held is not None
    scene.cache.remove(kind, held)


def calls(scene: Scene, verb: str) -> list[str]:
    return [name or kind for said, kind, name in scene.api.calls if said == verb]


def training_job(scene: Scene, attempt: int = 0) -> None:
    scene.add(JOBS, objects.finetune_job(status=training(attempt)))


def test_job_whose_label_was_removed_is_looked_up_once_and_stays_known() -> None:
    scene = Scene()
    training_job(scene)
    scene.add(BATCH_JOBS, objects.batch_job())
    takes_label_off(scene, BATCH_JOBS, objects.batch_job())
    first = scene.gather()
    assert [job.name for job in first.observed.batch_jobs] == ["tune-train-0"]
    assert first.revisit_after_seconds is not None
    assert first.revisit_after_seconds <= UNWATCHED_SECONDS
    assert calls(scene, "get").count("tune-train-0") == 1
    scene.gather(NOW + timedelta(seconds=UNWATCHED_SECONDS - 1))
    assert "tune-train-0" not in calls(scene, "get")


def test_what_becomes_of_a_job_without_its_label_is_seen_although_no_event_comes() -> None:
    scene = Scene()
    training_job(scene)
    scene.add(BATCH_JOBS, objects.batch_job())
    takes_label_off(scene, BATCH_JOBS, objects.batch_job())
    scene.gather()
    failed = {"conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]}
    scene.api.put(BATCH_JOBS, unlabelled(objects.batch_job(status=failed)))
    (job,) = scene.gather(NOW + timedelta(seconds=UNWATCHED_SECONDS)).observed.batch_jobs
    assert job.has("Failed")
    del scene.api.objects["Job", "team", "tune-train-0"]
    assert scene.gather(NOW + timedelta(seconds=2 * UNWATCHED_SECONDS)).observed.batch_jobs == ()


def test_child_that_is_really_gone_costs_one_read() -> None:
    scene = Scene()
    training_job(scene)
    scene.add(BATCH_JOBS, objects.batch_job())
    takes_label_off(scene, BATCH_JOBS, objects.batch_job())
    del scene.api.objects["Job", "team", "tune-train-0"]
    assert scene.gather().observed.batch_jobs == ()
    assert calls(scene, "get").count("tune-train-0") == 1
    scene.gather()
    assert "tune-train-0" not in calls(scene, "get")


def test_successor_of_the_same_name_is_not_taken_for_the_child() -> None:
    scene = Scene()
    training_job(scene)
    scene.add(BATCH_JOBS, objects.batch_job())
    takes_label_off(scene, BATCH_JOBS, objects.batch_job())
    scene.api.objects["Job", "team", "tune-train-0"]["metadata"]["uid"] = "its-successor"
    assert scene.gather().observed.batch_jobs == ()


def test_no_pass_is_made_while_it_is_not_known_whether_a_child_exists() -> None:
    scene = Scene()
    training_job(scene)
    scene.add(BATCH_JOBS, objects.batch_job())
    takes_label_off(scene, BATCH_JOBS, objects.batch_job())
    scene.api.fail["get"] = [ApiUnreachableError("reset")]
    with pytest.raises(ApiUnreachableError):
        scene.gather()
    assert [job.name for job in scene.gather().observed.batch_jobs] == ["tune-train-0"]


def test_plan_and_pod_without_their_labels_are_still_there() -> None:
    scene = Scene()
    training_job(scene)
    plan = {"metadata": objects.batch_job()["metadata"] | {"name": "tune-plan", "uid": "plan"}, "data": {"plan.json": "{}"}}
    scene.add(CONFIG_MAPS, plan)
    scene.add(BATCH_JOBS, objects.batch_job())
    scene.add(PODS, objects.pod(status={"phase": "Running"}))
    takes_label_off(scene, CONFIG_MAPS, plan)
    takes_label_off(scene, PODS, objects.pod(status={"phase": "Running"}))
    observed = scene.gather().observed
    assert observed.plan is not None
    assert observed.plan.plan_json == "{}"
    assert [(pod.phase, pod.gone) for pod in observed.pods] == [("Running", False)]


def test_current_job_that_only_a_live_list_shows_is_known_by_it() -> None:
    """After a restart of the operator: the first list is filtered by the label, too."""
    scene = Scene()
    training_job(scene, attempt=1)
    scene.add(BATCH_JOBS, unlabelled(objects.batch_job(attempt=1)), seen=False)
    observed = scene.gather().observed
    assert [job.name for job in observed.batch_jobs] == ["tune-train-1"]


def restarting() -> Scene:
    """Attempt 1 waits for attempt 0 to be gone."""
    scene = Scene()
    training_job(scene, attempt=1)
    scene.add(BATCH_JOBS, objects.batch_job(attempt=0))
    pod = objects.pod(attempt=0, status={"phase": "Running"})
    scene.add(PODS, pod | {"spec": {"nodeName": "node-7"}})
    return scene


def test_live_list_is_not_repeated_while_nothing_has_changed() -> None:
    scene = restarting()
    first = scene.gather().observed.live
    assert first is not None
    assert [(pod.name, pod.node) for pod in first.running_pods] == [("tune-train-0-0", "node-7")]
    assert calls(scene, "list") == ["Job", "Pod"]
    assert scene.gather(NOW + timedelta(seconds=LISTED_SECONDS - 1)).observed.live == first
    assert calls(scene, "list") == []
    scene.gather(NOW + timedelta(seconds=LISTED_SECONDS))
    assert calls(scene, "list") == ["Job", "Pod"]


def test_live_list_is_repeated_once_an_event_has_changed_what_it_showed() -> None:
    scene = restarting()
    scene.gather()
    scene.add(PODS, objects.pod(attempt=0, status={"phase": "Failed"}))
    live = scene.gather(NOW + timedelta(seconds=1)).observed.live
    assert live is not None
    assert live.running_pods == ()
    assert calls(scene, "list") == ["Job", "Pod"]


def test_live_list_of_nothing_is_never_believed_twice() -> None:
    scene = Scene()
    training_job(scene, attempt=1)
    for _ in range(2):
        live = scene.gather().observed.live
        assert live is not None
        assert live.batch_jobs == ()
        assert calls(scene, "list") == ["Job", "Pod"]


def test_live_list_by_which_the_next_job_may_be_made_is_never_believed_twice() -> None:
    """A Job that was made by it may be gone again, without its pods and without a trace in what is known."""
    scene = Scene()
    training_job(scene, attempt=1)
    done = {"conditions": [{"type": "Complete", "status": "True"}]}
    scene.add(BATCH_JOBS, objects.batch_job(role="preflight", status=done))
    live = scene.gather().observed.live
    assert live is not None
    assert ([job.name for job in live.batch_jobs], live.running_pods) == (["tune-preflight-0"], ())
    orphan = objects.pod(attempt=1, status={"phase": "Running"})
    orphan["metadata"]["ownerReferences"] = []
    scene.add(PODS, orphan, seen=False)
    live = scene.gather().observed.live
    assert live is not None
    assert [pod.name for pod in live.running_pods] == ["tune-train-1-0"]


def test_pod_of_which_no_event_comes_is_listed_again_soon() -> None:
    scene = Scene()
    training_job(scene, attempt=1)
    orphan = objects.pod(attempt=0, status={"phase": "Running"})
    orphan["metadata"]["ownerReferences"] = []
    scene.add(PODS, orphan, seen=False)
    live = scene.gather().observed.live
    assert live is not None
    assert [pod.name for pod in live.running_pods] == ["tune-train-0-0"]
    del scene.api.objects["Pod", "team", "tune-train-0-0"]
    live = scene.gather(NOW + timedelta(seconds=UNWATCHED_SECONDS)).observed.live
    assert live is not None
    assert live.running_pods == ()


def test_job_in_another_namespace_or_of_another_kind_of_owner_is_not_ours() -> None:
    scene = Scene()
    training_job(scene, attempt=1)
    for number, change in enumerate(({"apiVersion": "example.dev/v1"}, {"kind": "Workflow"}, {"controller": False})):
        document = objects.batch_job(attempt=0)
        document["metadata"] |= {"name": f"other-{number}", "uid": str(number)}
        document["metadata"]["ownerReferences"][0] |= change
        scene.add(BATCH_JOBS, document, seen=False)
    live = scene.gather().observed.live
    assert live is not None
    assert live.batch_jobs == ()


def test_job_and_pods_are_read_before_they_are_given_up_because_they_have_not_started() -> None:
    """What the watches have told last can be of before the deadline."""
    scene = Scene()
    scene.add(JOBS, objects.finetune_job(status=training(attempt=0), run={"startupDeadlineSeconds": 60}))
    scene.add(BATCH_JOBS, objects.batch_job(spec={"parallelism": 3}))
    for rank in range(2):
        scene.add(PODS, objects.pod(index=rank))
    due = datetime.fromisoformat(objects.CREATED) + timedelta(seconds=60)
    assert [pod.phase for pod in scene.gather(due - timedelta(seconds=1)).observed.pods] == ["Pending", "Pending"]
    assert (calls(scene, "list"), "tune-train-0" in calls(scene, "get")) == ([], False)
    # Nobody hears that one pod runs, one has lost its label and one was made only now.
    running = {
        "phase": "Running",
        "containerStatuses": [{"name": "trainer", "state": {"running": {"startedAt": objects.CREATED}}}],
    }
    scene.add(PODS, objects.pod(index=0, status=running), seen=False)
    bare = unlabelled(objects.pod(index=1, status=running))
    bare["metadata"]["annotations"] = {INDEX_LABEL: "1"}
    scene.add(PODS, bare, seen=False)
    scene.add(PODS, objects.pod(index=2, status=running), seen=False)
    assert [pod.phase for pod in scene.gather(due).observed.pods] == ["Running", "Running", "Running"]
    assert calls(scene, "list") == ["Pod"]
    scene.gather(due)
    assert (calls(scene, "list"), "tune-train-0" in calls(scene, "get")) == ([], False)


def test_job_that_would_be_given_up_and_is_gone_is_followed_by_another_after_a_live_list() -> None:
    scene = Scene()
    scene.add(JOBS, objects.finetune_job(status=training(attempt=1), run={"startupDeadlineSeconds": 60}))
    scene.add(BATCH_JOBS, objects.batch_job(attempt=1))
    scene.add(PODS, objects.pod(attempt=1))
    del scene.api.objects["Job", "team", "tune-train-1"]
    seen = scene.gather(NOW + timedelta(seconds=60)).observed
    assert seen.batch_jobs == ()
    assert seen.live is not None
    assert [pod.name for pod in seen.live.running_pods] == ["tune-train-1-0"]


@pytest.mark.parametrize(("seconds", "expected"), [(59, []), (60, [("tune-run", "run-uid")])])
def test_policies_of_a_job_are_looked_up_once_its_time_to_live_is_over(seconds: int, expected: list[tuple[str, str]]) -> None:
    scene = Scene()
    ended = {
        "startTime": objects.CREATED,
        "completionTime": "2026-01-02T03:05:00Z",
        "conditions": [
            {"type": "Finished", "status": "True", "reason": "Completed", "lastTransitionTime": objects.CREATED},
        ],
    }
    scene.add(JOBS, objects.finetune_job(status=ended, run={"ttlSecondsAfterFinished": 60}))
    references = objects.batch_job()["metadata"]["ownerReferences"]
    plan = objects.metadata("tune-plan", "plan-uid", labels=objects.labels("train", 0), ownerReferences=references)
    scene.add(CONFIG_MAPS, {"metadata": plan, "data": {"plan.json": "{}"}})
    ours = objects.metadata("tune-run", "run-uid", ownerReferences=references)
    scene.add(NETWORK_POLICIES, {"metadata": ours}, seen=False)
    # Of somebody else, or going already.
    scene.add(NETWORK_POLICIES, {"metadata": objects.metadata("tune-ways-out", "foreign-uid")}, seen=False)
    later = NOW + timedelta(seconds=seconds)
    assert scene.gather(later).observed.network_policies == tuple(PolicyView(name, uid) for name, uid in expected)
    scene.add(NETWORK_POLICIES, {"metadata": ours | {"deletionTimestamp": objects.CREATED}}, seen=False)
    assert scene.gather(later).observed.network_policies == ()
    held = scene.cache.owned(CONFIG_MAPS, "job-uid")[0]
    scene.cache.bury(CONFIG_MAPS, held)
    scene.gather(later)
    assert calls(scene, "get") == [], "nothing is left by which anybody would look again"

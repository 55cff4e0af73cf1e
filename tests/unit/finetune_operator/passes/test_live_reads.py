"""What no watch shows: children without their label, and the live lists before a later attempt."""

from datetime import datetime, timedelta
from typing import Any

import pytest

from finetune_job.names import INDEX_LABEL
from finetune_operator.client.kinds import BATCH_JOBS, CONFIG_MAPS, PODS
from finetune_operator.passes.live_reads import LISTED_SECONDS, UNWATCHED_SECONDS
from tests.unit.finetune_operator import objects
from tests.unit.finetune_operator.passes.test_gather import NOW, Scene, training


def unlabelled(document: dict[str, Any]) -> dict[str, Any]:
    return document | {"metadata": document["metadata"] | {"labels": {}}}


def calls(scene: Scene, verb: str) -> list[str]:
    return [name or kind for said, kind, name in scene.api.calls if said == verb]


def test_plan_without_its_label_is_found_by_its_name() -> None:
    scene = Scene(status=training(0))
    plan = {"metadata": objects.batch_job()["metadata"] | {"name": "tune-plan", "uid": "plan"}, "data": {"plan.json": "{}"}}
    scene.add(CONFIG_MAPS, unlabelled(plan), seen=False)
    assert scene.gather().observed.plan.plan_json == "{}"


@pytest.mark.parametrize("has_label", [True, False])
def test_current_job_that_only_a_live_list_shows_is_known_by_it_if_watches_will_show_its_end(has_label: bool) -> None:
    scene = Scene(status=training(1))
    job = objects.batch_job(attempt=1)
    scene.add(BATCH_JOBS, job if has_label else unlabelled(job), seen=False)
    observed = scene.gather().observed
    assert [job.name for job in observed.batch_jobs] == (["tune-train-1"] if has_label else [])
    assert [job.name for job in observed.live.batch_jobs] == ["tune-train-1"]


def restarting() -> Scene:
    """Attempt 1 waits for attempt 0 to be gone."""
    scene = Scene(status=training(1))
    scene.add(BATCH_JOBS, objects.batch_job(attempt=0))
    pod = objects.pod(attempt=0, status={"phase": "Running"})
    scene.add(PODS, pod | {"spec": {"nodeName": "node-7"}})
    return scene


def test_live_list_is_not_repeated_while_nothing_has_changed() -> None:
    scene = restarting()
    first = scene.gather().observed.live
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
    assert live.running_pods == ()
    assert calls(scene, "list") == ["Job", "Pod"]


def test_live_list_of_nothing_is_never_believed_twice() -> None:
    scene = Scene(status=training(1))
    for _ in range(2):
        live = scene.gather().observed.live
        assert live.batch_jobs == ()
        assert calls(scene, "list") == ["Job", "Pod"]


def test_live_list_by_which_the_next_job_may_be_made_is_never_believed_twice() -> None:
    """A Job that was made by it may be gone again, without its pods and without a trace in what is known."""
    scene = Scene(status=training(1))
    done = {"conditions": [{"type": "Complete", "status": "True"}]}
    scene.add(BATCH_JOBS, objects.batch_job(role="preflight", status=done))
    live = scene.gather().observed.live
    assert ([job.name for job in live.batch_jobs], live.running_pods) == (["tune-preflight-0"], ())
    orphan = objects.pod(attempt=1, status={"phase": "Running"})
    orphan["metadata"]["ownerReferences"] = []
    scene.add(PODS, orphan, seen=False)
    live = scene.gather().observed.live
    assert [pod.name for pod in live.running_pods] == ["tune-train-1-0"]


def test_pod_of_which_no_event_comes_is_listed_again_soon() -> None:
    scene = Scene(status=training(1))
    orphan = objects.pod(attempt=0, status={"phase": "Running"})
    orphan["metadata"]["ownerReferences"] = []
    scene.add(PODS, orphan, seen=False)
    live = scene.gather().observed.live
    assert [pod.name for pod in live.running_pods] == ["tune-train-0-0"]
    del scene.api.objects["Pod", "team", "tune-train-0-0"]
    live = scene.gather(NOW + timedelta(seconds=UNWATCHED_SECONDS)).observed.live
    assert live.running_pods == ()


def test_job_and_pods_are_read_before_they_are_given_up_because_they_have_not_started() -> None:
    """What the watches have told last can be of before the deadline."""
    scene = Scene(status=training(attempt=0), run={"startupDeadlineSeconds": 60})
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
    scene = Scene(status=training(attempt=1), run={"startupDeadlineSeconds": 60})
    scene.add(BATCH_JOBS, objects.batch_job(attempt=1))
    scene.add(PODS, objects.pod(attempt=1))
    del scene.api.objects["Job", "team", "tune-train-1"]
    seen = scene.gather(NOW + timedelta(seconds=60)).observed
    assert seen.batch_jobs == ()
    assert [pod.name for pod in seen.live.running_pods] == ["tune-train-1-0"]

from typing import Any

from finetune_operator.cluster.cache import TOMBSTONE_SECONDS, Cache, JobKey
from finetune_operator.cluster.kinds import BATCH_JOBS, JOBS, PODS, PROFILES, Kind
from finetune_operator.cluster.projection import project
from tests.unit.operator_effects import objects
from tests.unit.operator_effects.fakes import Clock

KEY = JobKey("team", "tune")


def put(cache: Cache, kind: Kind, document: dict[str, Any]) -> set[JobKey]:
    return cache.apply(kind, project(kind, document))


def filled(clock: Clock | None = None) -> Cache:
    cache = Cache(clock or Clock())
    put(cache, JOBS, objects.finetune_job())
    put(cache, BATCH_JOBS, objects.batch_job())
    put(cache, PODS, objects.pod())
    return cache


def test_children_are_found_by_owner_and_wake_their_job() -> None:
    cache = Cache(Clock())
    assert put(cache, JOBS, objects.finetune_job()) == {KEY}
    assert put(cache, BATCH_JOBS, objects.batch_job()) == {KEY}
    assert put(cache, PODS, objects.pod()) == {KEY}
    assert [held.key.name for held in cache.owned(BATCH_JOBS, "job-uid")] == ["tune-train-0"]
    assert [held.key.name for held in cache.pods_of("job-uid")] == ["tune-train-0-0"]


def test_older_and_equal_versions_are_ignored() -> None:
    cache = filled()
    assert put(cache, JOBS, objects.finetune_job(version=5)) == set()  # nothing but the version is new
    assert put(cache, JOBS, objects.finetune_job(version=4, profile="old")) == set()
    assert put(cache, JOBS, objects.finetune_job(version=5, profile="same version")) == set()
    held = cache.job(KEY)
    assert held is not None
    assert "profile" not in held.document()["spec"]
    assert put(cache, JOBS, objects.finetune_job(version=6, profile="new")) == {KEY}


def test_labels_alone_make_no_child() -> None:
    """Anyone may write labels; only the controller reference to the job's UID counts."""
    cache = filled()
    forged = objects.batch_job(attempt=1)
    forged["metadata"]["ownerReferences"] = []
    put(cache, BATCH_JOBS, forged)
    lost = objects.pod(attempt=1)
    put(cache, PODS, lost)
    assert [held.key.name for held in cache.owned(BATCH_JOBS, "job-uid")] == ["tune-train-0"]
    assert [held.key.name for held in cache.pods_of("job-uid")] == ["tune-train-0-0"]


def test_deleted_pod_is_kept_as_evidence_even_after_its_job() -> None:
    cache = filled()
    ended = {
        "phase": "Failed",
        "containerStatuses": [{"state": {"terminated": {"exitCode": 47, "message": "why", "reason": "Error"}}}],
    }
    assert cache.remove(PODS, project(PODS, objects.pod(version=9, status=ended))) == {KEY}
    cache.remove(BATCH_JOBS, project(BATCH_JOBS, objects.batch_job(version=10)))
    (held,) = cache.pods_of("job-uid")
    assert held.pod is not None
    assert (held.pod.gone, held.pod.exit_code, held.pod.termination_message) == (True, 47, "why")
    cache.forget_evidence("job-uid", lambda _: True)
    assert cache.pods_of("job-uid") == []
    assert cache.batch_job_uids_of("job-uid") == set()


def test_evidence_goes_with_its_finetune_job() -> None:
    cache = filled()
    cache.remove(PODS, project(PODS, objects.pod(version=9)))
    cache.remove(JOBS, project(JOBS, objects.finetune_job(version=10)))
    assert cache.num_objects()["Pod"] == 0
    assert cache.job(KEY) is None


def test_list_begun_before_a_deletion_does_not_bring_the_object_back() -> None:
    cache = filled()
    cache.remove(BATCH_JOBS, project(BATCH_JOBS, objects.batch_job(version=3)))
    assert put(cache, BATCH_JOBS, objects.batch_job(version=2)) == set()
    assert cache.owned(BATCH_JOBS, "job-uid") == []


def test_relist_drops_ghosts_but_nothing_newer_than_the_list() -> None:
    clock = Clock()
    cache = filled(clock)
    put(cache, BATCH_JOBS, objects.batch_job(attempt=1, version=50))
    assert cache.drop_ghosts(BATCH_JOBS, [], "40") == {KEY}
    assert [held.key.name for held in cache.owned(BATCH_JOBS, "job-uid")] == ["tune-train-1"]
    assert cache.drop_ghosts(BATCH_JOBS, ["tune-train-1-uid"], "60") == set()
    assert cache.drop_ghosts(BATCH_JOBS, [], "60", ("another-namespace",)) == set()
    clock.now += TOMBSTONE_SECONDS + 1
    cache.drop_ghosts(PODS, ["tune-train-0-0-uid"], "60")
    assert cache._tombstones == {}


def test_job_made_anew_under_its_old_name_is_another_job() -> None:
    cache = filled()
    put(cache, JOBS, objects.finetune_job(version=20, uid="second"))
    cache.remove(JOBS, project(JOBS, objects.finetune_job(version=19)))
    held = cache.job(KEY)
    assert held is not None
    assert held.key.uid == "second"
    assert cache.owned(BATCH_JOBS, "second") == []


def test_changed_profile_wakes_the_unfinished_jobs_that_use_it() -> None:
    cache = filled()
    finished = {"conditions": [{"type": "Finished", "status": "True", "reason": "Completed"}]}
    other = objects.finetune_job(uid="other", status=finished)
    other["metadata"]["name"] = "done"
    put(cache, JOBS, other)
    profile = {"metadata": {"name": "default", "uid": "p", "resourceVersion": "7"}, "spec": {"trainerImage": "image:1"}}
    assert put(cache, PROFILES, profile) == {KEY}
    profile["metadata"] |= {"name": "unused", "uid": "q"}
    assert put(cache, PROFILES, profile) == set()

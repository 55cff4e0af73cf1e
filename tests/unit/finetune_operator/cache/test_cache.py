from typing import Any

import pytest

from finetune_operator.cache.cache import TOMBSTONE_SECONDS, Cache
from finetune_operator.client.kinds import BATCH_JOBS, CONFIG_MAPS, JOBS, PODS, PROFILES, SERVICES, JobKey, Kind
from tests.unit.finetune_operator import objects
from tests.unit.finetune_operator.fakes import Clock

KEY = JobKey("team", "tune")


def filled(clock: Clock | None = None) -> Cache:
    cache = Cache(clock or Clock())
    cache.take(JOBS, objects.finetune_job())
    cache.take(BATCH_JOBS, objects.batch_job())
    cache.take(PODS, objects.pod())
    return cache


def test_children_are_found_by_owner_and_wake_their_job() -> None:
    cache = Cache(Clock())
    assert cache.take(JOBS, objects.finetune_job()) == {KEY}
    assert cache.take(BATCH_JOBS, objects.batch_job()) == {KEY}
    assert cache.take(PODS, objects.pod()) == {KEY}
    assert [held.key.name for held in cache.owned(BATCH_JOBS, "job-uid")] == ["tune-train-0"]
    assert [held.key.name for held in cache.pods_of("job-uid")] == ["tune-train-0-0"]


def test_older_and_equal_versions_are_ignored() -> None:
    cache = filled()
    assert cache.take(JOBS, objects.finetune_job(version=5)) == set()  # nothing but the version is new
    assert cache.take(JOBS, objects.finetune_job(version=4, profile="old")) == set()
    assert cache.take(JOBS, objects.finetune_job(version=5, profile="same version")) == set()
    held = cache.job(KEY)
    assert "profile" not in held.document()["spec"]
    assert cache.take(JOBS, objects.finetune_job(version=6, profile="new")) == {KEY}


def test_state_that_was_read_before_a_newer_one_was_taken_in_does_not_replace_it() -> None:
    """The watch thread reads; before the main loop takes that in, an answer to an own write may have shown more."""
    cache = filled()
    read_early = cache.read(JOBS, objects.finetune_job(version=5, profile="old"))
    assert read_early is not None
    cache.take(JOBS, objects.finetune_job(version=6, profile="new"))
    assert cache.apply(JOBS, read_early) == set()
    held = cache.job(KEY)
    assert held.document()["spec"]["profile"] == "new"
    assert held.key.version == 6


def test_labels_alone_make_no_child() -> None:
    """Anyone may write labels; only the controller reference to the job's UID counts."""
    cache = filled()
    forged = objects.batch_job(attempt=1)
    forged["metadata"]["ownerReferences"] = []
    cache.take(BATCH_JOBS, forged)
    lost = objects.pod(attempt=1)
    cache.take(PODS, lost)
    assert [held.key.name for held in cache.owned(BATCH_JOBS, "job-uid")] == ["tune-train-0"]
    assert [held.key.name for held in cache.pods_of("job-uid")] == ["tune-train-0-0"]


def test_deleted_pod_is_kept_as_evidence_even_after_its_job() -> None:
    cache = filled()
    ended = {
        "phase": "Failed",
        "containerStatuses": [{"state": {"terminated": {"exitCode": 47, "message": "why", "reason": "Error"}}}],
    }
    assert cache.take_deleted(PODS, objects.pod(version=9, status=ended)) == {KEY}
    cache.take_deleted(BATCH_JOBS, objects.batch_job(version=10))
    (held,) = cache.pods_of("job-uid")
    assert (held.pod.gone, held.pod.exit_code, held.pod.termination_message) == (True, 47, "why")
    cache.forget_evidence("job-uid", lambda _: True)
    assert cache.pods_of("job-uid") == []
    assert cache.batch_job_uids_of("job-uid") == set()


def test_evidence_goes_with_its_finetune_job() -> None:
    cache = filled()
    cache.take_deleted(PODS, objects.pod(version=9))
    cache.take_deleted(JOBS, objects.finetune_job(version=10))
    assert cache.num_objects()["Pod"] == 0
    assert cache.job(KEY) is None


def test_list_begun_before_a_deletion_does_not_bring_the_object_back() -> None:
    cache = filled()
    cache.take_deleted(BATCH_JOBS, objects.batch_job(version=3))
    assert cache.take(BATCH_JOBS, objects.batch_job(version=2)) == set()
    assert cache.owned(BATCH_JOBS, "job-uid") == []


def test_state_that_a_later_list_does_not_show_is_gone_and_nothing_newer_is() -> None:
    clock = Clock()
    cache = filled(clock)
    cache.take(BATCH_JOBS, objects.batch_job(attempt=1, version=50))
    assert cache.remove_missing(BATCH_JOBS, set(), 40) == {KEY}
    assert [held.key.name for held in cache.owned(BATCH_JOBS, "job-uid")] == ["tune-train-1"]
    assert cache.remove_missing(BATCH_JOBS, set(), 60, ("another-namespace",)) == set()
    assert cache.take(BATCH_JOBS, objects.batch_job(version=40)) == set(), "an event from before the list"
    assert cache.remove_missing(BATCH_JOBS, {"tune-train-1-uid"}, 60) == set()
    clock.now += TOMBSTONE_SECONDS + 1
    cache.remove_missing(PODS, {"tune-train-0-0-uid"}, 60)
    assert cache._tombstones == {}


def test_job_that_a_later_list_does_not_show_is_gone() -> None:
    cache = filled()
    assert cache.remove_missing(JOBS, set(), 5) == {KEY}
    assert cache.job(KEY) is None


def test_job_made_again_under_its_old_name_is_another_job() -> None:
    cache = filled()
    cache.take(JOBS, objects.finetune_job(version=20, uid="second"))
    cache.take_deleted(JOBS, objects.finetune_job(version=19))
    held = cache.job(KEY)
    assert held.key.uid == "second"
    assert cache.owned(BATCH_JOBS, "second") == []


def test_late_events_of_an_earlier_object_do_not_take_the_name_from_the_next_one() -> None:
    """kopf keeps the order of one object's events only, and an answer to a request may be ahead of all of them."""
    cache = filled()
    profile = {"metadata": {"name": "default", "uid": "p", "resourceVersion": "7"}, "spec": {"trainerImage": "image:1"}}
    cache.take(PROFILES, profile)
    cache.take(JOBS, objects.finetune_job(version=20, uid="second"))
    cache.take(PROFILES, {**profile, "metadata": {"name": "default", "uid": "q", "resourceVersion": "21"}})
    late = {**profile, "metadata": {**profile["metadata"], "resourceVersion": "18"}}
    for taken in (Cache.take, Cache.take_deleted):
        taken(cache, JOBS, objects.finetune_job(version=18, profile="edited"))
        taken(cache, PROFILES, late)
        job, its_profile = cache.job(KEY), cache.profile("default")
        assert (job.key.uid, its_profile.key.uid) == ("second", "q")
        assert cache.job_keys() == [KEY]


def test_changed_profile_wakes_the_unfinished_jobs_that_use_it() -> None:
    cache = filled()
    finished = {"conditions": [{"type": "Finished", "status": "True", "reason": "Completed"}]}
    other = objects.finetune_job(uid="other", status=finished)
    other["metadata"]["name"] = "done"
    cache.take(JOBS, other)
    profile = {"metadata": {"name": "default", "uid": "p", "resourceVersion": "7"}, "spec": {"trainerImage": "image:1"}}
    assert cache.take(PROFILES, profile) == {KEY}
    profile["metadata"] |= {"name": "unused", "uid": "q"}
    assert cache.take(PROFILES, profile) == set()


@pytest.mark.parametrize("kind", [BATCH_JOBS, PODS], ids=lambda kind: kind.name)
def test_child_that_loses_its_label_counts_as_deleted_until_it_has_the_label_again(kind: Kind) -> None:
    made = objects.batch_job if kind == BATCH_JOBS else objects.pod
    cache = filled()
    assert cache.take_deleted(kind, made(version=7)) == {KEY}
    assert [held for held in cache.owned(kind, "job-uid") + cache.pods_of("job-uid") if not held.is_gone] == (
        [] if kind == PODS else cache.pods_of("job-uid")
    )
    assert cache.take(kind, made(version=8)) == {KEY}
    assert len(cache.owned(BATCH_JOBS, "job-uid")) == len(cache.pods_of("job-uid")) == 1
    assert cache.take_deleted(kind, made(version=7)) == set(), "a late event"


def test_live_answer_overrides_the_watch_until_the_next_list() -> None:
    cache = filled()
    cache.take_deleted(BATCH_JOBS, objects.batch_job(version=7))
    unlabelled = objects.batch_job(version=7)
    unlabelled["metadata"]["labels"] = {}
    assert cache.found(BATCH_JOBS, unlabelled)
    assert not cache.is_watched(BATCH_JOBS, "tune-train-0-uid")
    assert cache.remove_missing(BATCH_JOBS, set(), 99) == {KEY}
    assert cache.owned(BATCH_JOBS, "job-uid") == []


def test_state_from_before_a_deletion_is_refused_and_a_later_one_is_believed() -> None:
    cache = filled()
    cache.take_deleted(BATCH_JOBS, objects.batch_job(version=7))
    assert cache.take(BATCH_JOBS, objects.batch_job(version=6)) == set()
    assert cache.take(BATCH_JOBS, objects.batch_job(version=8)) == {KEY}


def test_deletion_that_is_seen_before_the_answer_to_the_create_is_not_undone_by_it() -> None:
    cache = filled()
    cache.take_deleted(BATCH_JOBS, objects.batch_job(attempt=1, version=9))
    assert cache.take(BATCH_JOBS, objects.batch_job(attempt=1, version=8)) == set()
    assert len(cache.owned(BATCH_JOBS, "job-uid")) == 1


def stranger(made: Kind, changed: dict[str, Any] | None = None) -> dict[str, Any]:
    document = objects.batch_job(attempt=5) if made != PODS else objects.pod(attempt=0, index=5)
    document["metadata"]["uid"] = "strange"
    document["metadata"]["ownerReferences"][0] |= changed or {}
    document["data"] = {"plan.json": "x" * 2**20}
    return document


@pytest.mark.parametrize("kind", [BATCH_JOBS, CONFIG_MAPS, SERVICES, PODS], ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    "changed", [{"controller": False}, {"kind": "Deployment"}, {"apiVersion": "apps/v1"}, {"uid": 7}, {"uid": "x" * 65}], ids=str
)
def test_object_that_is_not_controlled_by_a_job_of_ours_is_not_kept(kind: Kind, changed: dict[str, Any]) -> None:
    cache = filled()
    before = cache.num_objects()
    assert cache.take(kind, stranger(kind, changed)) == set()
    assert cache.num_objects() == before


@pytest.mark.parametrize("kind", [BATCH_JOBS, CONFIG_MAPS, SERVICES, PODS], ids=lambda kind: kind.name)
def test_reference_from_another_namespace_makes_no_child(kind: Kind) -> None:
    """Anyone who knows a UID can write it into a reference, but not in the job's namespace."""
    cache = filled()
    before = cache.num_objects()
    forged = stranger(kind)
    forged["metadata"]["namespace"] = "another"
    assert cache.take(kind, forged) == set()
    assert cache.num_objects() == before


def test_child_that_cannot_be_read_stays_as_it_was() -> None:
    cache = filled()
    unreadable = objects.batch_job(version=5)
    unreadable["metadata"]["resourceVersion"] = "²"
    for take in (Cache.take, Cache.take_deleted):
        assert take(cache, BATCH_JOBS, unreadable) == set()
        assert len(cache.owned(BATCH_JOBS, "job-uid")) == 1


def test_child_whose_owner_was_taken_off_is_no_child_any_more() -> None:
    cache = filled()
    orphan = objects.batch_job(version=5)
    orphan["metadata"]["ownerReferences"] = []
    assert cache.take(BATCH_JOBS, orphan) == {KEY}
    assert cache.owned(BATCH_JOBS, "job-uid") == []


def test_nothing_stays_behind_when_a_job_goes() -> None:
    cache = filled()
    gone: list[str] = []
    cache.job_gone = gone.append
    cache.take_deleted(PODS, objects.pod(version=8))
    cache.take_deleted(JOBS, objects.finetune_job(version=9))
    assert gone == ["job-uid"]
    cache.take_deleted(BATCH_JOBS, objects.batch_job(version=10))
    assert sum(cache.num_objects().values()) == 0
    assert (cache._owned[BATCH_JOBS], cache._owned[PODS], cache._batch_jobs_of) == ({}, {}, {})
    assert cache._job_of_batch_job == {}


def test_pod_that_is_seen_only_when_it_is_deleted_is_evidence() -> None:
    cache = Cache(Clock())
    cache.take(JOBS, objects.finetune_job())
    cache.take(BATCH_JOBS, objects.batch_job())
    assert cache.take_deleted(PODS, objects.pod(version=9)) == {KEY}
    assert [held.is_gone for held in cache.pods_of("job-uid")] == [True]
    cache.forget_evidence("job-uid", lambda _: True)
    assert cache.take_deleted(PODS, objects.pod(version=9)) == set()
    assert cache.pods_of("job-uid") == []

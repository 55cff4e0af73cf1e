from typing import Any

import pytest

from finetune_operator.cluster import store
from finetune_operator.cluster.cache import TOMBSTONE_SECONDS, Cache, JobKey
from finetune_operator.cluster.kinds import BATCH_JOBS, CONFIG_MAPS, JOBS, PODS, PROFILES, SERVICES, Kind
from tests.unit.finetune_operator.cluster import objects
from tests.unit.finetune_operator.cluster.fakes import Clock

KEY = JobKey("team", "tune")


def put(cache: Cache, kind: Kind, document: dict[str, Any]) -> set[JobKey]:
    return cache.take(kind, document)


def deleted(cache: Cache, kind: Kind, document: dict[str, Any]) -> set[JobKey]:
    """The watch says DELETED, of an object whose deletion somebody had asked for."""
    document["metadata"]["deletionTimestamp"] = objects.CREATED
    return vanished(cache, kind, document)


def vanished(cache: Cache, kind: Kind, document: dict[str, Any]) -> set[JobKey]:
    """The watch says DELETED; `document` is the last state that it shows, at the version of the event."""
    held = cache.read(kind, document)
    return set() if held is None else cache.remove(kind, held)


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


def test_state_that_was_read_before_a_newer_one_was_taken_in_does_not_replace_it() -> None:
    """The watch thread reads; before the main loop takes that in, an answer to an own write may have shown more."""
    cache = filled()
    read_early = cache.read(JOBS, objects.finetune_job(version=5, profile="old"))
    assert read_early is not None
    put(cache, JOBS, objects.finetune_job(version=6, profile="new"))
    assert cache.apply(JOBS, read_early) == set()
    held = cache.job(KEY)
    assert held is not None
    assert held.document()["spec"]["profile"] == "new"
    assert held.key.version == 6


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
    assert deleted(cache, PODS, objects.pod(version=9, status=ended)) == {KEY}
    deleted(cache, BATCH_JOBS, objects.batch_job(version=10))
    (held,) = cache.pods_of("job-uid")
    assert held.pod is not None
    assert (held.pod.gone, held.pod.exit_code, held.pod.termination_message) == (True, 47, "why")
    cache.forget_evidence("job-uid", lambda _: True)
    assert cache.pods_of("job-uid") == []
    assert cache.batch_job_uids_of("job-uid") == set()


def test_evidence_goes_with_its_finetune_job() -> None:
    cache = filled()
    deleted(cache, PODS, objects.pod(version=9))
    deleted(cache, JOBS, objects.finetune_job(version=10))
    assert cache.num_objects()["Pod"] == 0
    assert cache.job(KEY) is None


def test_list_begun_before_a_deletion_does_not_bring_the_object_back() -> None:
    cache = filled()
    deleted(cache, BATCH_JOBS, objects.batch_job(version=3))
    assert put(cache, BATCH_JOBS, objects.batch_job(version=2)) == set()
    assert cache.owned(BATCH_JOBS, "job-uid") == []


def test_state_that_a_later_list_does_not_show_is_in_doubt_and_nothing_newer_is() -> None:
    clock = Clock()
    cache = filled(clock)
    put(cache, BATCH_JOBS, objects.batch_job(attempt=1, version=50))
    assert cache.remove_missing(BATCH_JOBS, set(), 40) == {KEY}
    assert [child.held.key.name for child in cache.to_look_up("job-uid")] == ["tune-train-0"]
    cache.found_gone(BATCH_JOBS, "tune-train-0-uid")
    assert [held.key.name for held in cache.owned(BATCH_JOBS, "job-uid")] == ["tune-train-1"]
    assert cache.remove_missing(BATCH_JOBS, {"tune-train-1-uid"}, 60) == set()
    assert cache.remove_missing(BATCH_JOBS, set(), 60, ("another-namespace",)) == set()
    assert cache.to_look_up("job-uid") == []
    clock.now += TOMBSTONE_SECONDS + 1
    cache.remove_missing(PODS, {"tune-train-0-0-uid"}, 60)
    assert cache._tombstones == {}


def test_job_that_a_later_list_does_not_show_is_gone() -> None:
    cache = filled()
    assert cache.remove_missing(JOBS, set(), 5) == {KEY}
    assert cache.job(KEY) is None


def test_job_made_anew_under_its_old_name_is_another_job() -> None:
    cache = filled()
    put(cache, JOBS, objects.finetune_job(version=20, uid="second"))
    deleted(cache, JOBS, objects.finetune_job(version=19))
    held = cache.job(KEY)
    assert held is not None
    assert held.key.uid == "second"
    assert cache.owned(BATCH_JOBS, "second") == []


def test_late_events_of_an_earlier_object_do_not_take_the_name_from_the_next_one() -> None:
    """kopf keeps the order of one object's events only, and an answer to a request may be ahead of all of them."""
    cache = filled()
    profile = {"metadata": {"name": "default", "uid": "p", "resourceVersion": "7"}, "spec": {"trainerImage": "image:1"}}
    put(cache, PROFILES, profile)
    put(cache, JOBS, objects.finetune_job(version=20, uid="second"))
    put(cache, PROFILES, {**profile, "metadata": {"name": "default", "uid": "q", "resourceVersion": "21"}})
    late = {**profile, "metadata": {**profile["metadata"], "resourceVersion": "18"}}
    for told in (put, deleted):
        told(cache, JOBS, objects.finetune_job(version=18, profile="edited"))
        told(cache, PROFILES, late)
        job, its_profile = cache.job(KEY), cache.profile("default")
        assert job is not None
        assert its_profile is not None
        assert (job.key.uid, its_profile.key.uid) == ("second", "q")
        assert cache.job_keys() == [KEY]


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


def test_child_that_nobody_asked_to_delete_is_in_doubt_when_the_watch_no_longer_shows_it() -> None:
    """A label that is taken off looks the same to the watch: DELETED, with the state before."""
    cache = filled()
    assert vanished(cache, BATCH_JOBS, objects.batch_job(version=7)) == {KEY}
    assert [held.key.name for held in cache.owned(BATCH_JOBS, "job-uid")] == ["tune-train-0"]
    assert [child.held.key.name for child in cache.to_look_up("job-uid")] == ["tune-train-0"]


def test_live_answer_beats_the_watch_and_the_tombstone() -> None:
    for doubt in (vanished, deleted):
        cache = filled()
        doubt(cache, BATCH_JOBS, objects.batch_job(version=7))
        unlabelled = objects.batch_job(version=7)
        unlabelled["metadata"]["labels"] = {}
        assert cache.found(BATCH_JOBS, unlabelled)
        (held,) = cache.owned(BATCH_JOBS, "job-uid")
        assert not held.key.is_labelled
        assert not cache.is_in_doubt(held)
        # It stays among those that only a live read can tell of, and no list without it removes it.
        assert cache.remove_missing(BATCH_JOBS, set(), 99) == set()
        assert [child.held for child in cache.to_look_up("job-uid")] == [held]


@pytest.mark.parametrize("kind", [BATCH_JOBS, PODS], ids=lambda kind: kind.name)
def test_live_answer_ends_the_doubt_that_a_list_without_the_object_raised(kind: Kind) -> None:
    """The object has not changed since: the answer shows the version that is known."""
    cache = filled()
    assert cache.remove_missing(kind, set(), 40) == {KEY}
    assert len(cache.to_look_up("job-uid")) == 1
    assert cache.found(kind, objects.batch_job() if kind == BATCH_JOBS else objects.pod())
    assert cache.to_look_up("job-uid") == []
    assert len(cache.owned(BATCH_JOBS, "job-uid")) == len(cache.pods_of("job-uid")) == 1


def test_event_of_the_removed_label_that_comes_after_the_live_answer_changes_nothing() -> None:
    cache = filled()
    unlabelled = objects.batch_job(version=7)
    unlabelled["metadata"]["labels"] = {}
    cache.found(BATCH_JOBS, unlabelled)
    assert vanished(cache, BATCH_JOBS, objects.batch_job(version=7)) == set()
    assert not cache.is_in_doubt(cache.owned(BATCH_JOBS, "job-uid")[0])


def test_label_that_is_put_back_makes_the_object_watched_again() -> None:
    cache = filled()
    vanished(cache, BATCH_JOBS, objects.batch_job(version=7))
    assert put(cache, BATCH_JOBS, objects.batch_job(version=8)) == {KEY}
    assert cache.to_look_up("job-uid") == []
    assert cache.is_watched(BATCH_JOBS, "tune-train-0-uid")


def test_state_from_before_a_deletion_is_refused_and_a_later_one_is_believed() -> None:
    cache = filled()
    deleted(cache, BATCH_JOBS, objects.batch_job(version=7))
    assert put(cache, BATCH_JOBS, objects.batch_job(version=6)) == set()
    assert put(cache, BATCH_JOBS, objects.batch_job(version=8)) == {KEY}


def test_deletion_that_is_seen_before_the_answer_to_the_create_is_not_undone_by_it() -> None:
    cache = filled()
    deleted(cache, BATCH_JOBS, objects.batch_job(attempt=1, version=9))
    assert put(cache, BATCH_JOBS, objects.batch_job(attempt=1, version=8)) == set()
    assert len(cache.owned(BATCH_JOBS, "job-uid")) == 1


def test_pod_in_doubt_is_evidence_once_it_is_gone_and_lives_on_if_it_is_not() -> None:
    ended = {"phase": "Failed", "containerStatuses": [{"state": {"terminated": {"exitCode": 47}}}]}
    cache = filled()
    vanished(cache, PODS, objects.pod(version=9, status=ended))
    (held,) = cache.pods_of("job-uid")
    assert held.pod is not None
    assert (held.pod.gone, held.pod.exit_code) == (False, 47)
    cache.found_gone(PODS, held.key.uid)
    (held,) = cache.pods_of("job-uid")
    assert held.is_gone


def stranger(made: Kind, changed: dict[str, Any] | None = None) -> dict[str, Any]:
    document = objects.batch_job(attempt=5) if made != PODS else objects.pod(attempt=0, index=5)
    document["metadata"]["uid"] = "strange"
    document["metadata"]["ownerReferences"][0] |= changed or {}
    document["data"] = {"plan.json": "x" * 2**20}
    return document


@pytest.mark.parametrize("kind", [BATCH_JOBS, CONFIG_MAPS, SERVICES, PODS], ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    "changed",
    [{"controller": False}, {"kind": "Deployment"}, {"apiVersion": "apps/v1"}, {"uid": 7}, {"uid": "x" * 65}],
    ids=str,
)
def test_object_that_is_not_controlled_by_a_job_of_ours_is_not_kept(kind: Kind, changed: dict[str, Any]) -> None:
    cache = filled()
    before = cache.num_objects()
    assert put(cache, kind, stranger(kind, changed)) == set()
    assert cache.num_objects() == before


@pytest.mark.parametrize("kind", [BATCH_JOBS, CONFIG_MAPS, SERVICES, PODS], ids=lambda kind: kind.name)
def test_reference_from_another_namespace_makes_no_child(kind: Kind) -> None:
    """Anyone who knows a UID can write it into a reference, but not in the job's namespace."""
    cache = filled()
    before = cache.num_objects()
    forged = stranger(kind)
    forged["metadata"]["namespace"] = "another"
    assert put(cache, kind, forged) == set()
    assert cache.num_objects() == before


def test_of_an_object_whose_owner_is_not_known_only_the_key_is_kept_until_it_is_looked_up() -> None:
    cache = Cache(Clock())
    config_map = stranger(CONFIG_MAPS)
    assert put(cache, CONFIG_MAPS, config_map) == set()
    assert cache.owned(CONFIG_MAPS, "job-uid") == []
    put(cache, JOBS, objects.finetune_job())
    (child,) = cache.to_look_up("job-uid")
    assert (child.kind, child.held.compressed) == (CONFIG_MAPS, b"")
    assert cache.found(CONFIG_MAPS, config_map)
    assert len(cache.owned(CONFIG_MAPS, "job-uid")) == 1
    assert cache.to_look_up("job-uid") == []


def test_pod_that_is_seen_before_its_job_is_looked_up_once_the_job_is_known() -> None:
    cache = Cache(Clock())
    put(cache, JOBS, objects.finetune_job())
    assert put(cache, PODS, objects.pod()) == set()
    assert put(cache, BATCH_JOBS, objects.batch_job()) == {KEY}
    assert [child.kind for child in cache.to_look_up("job-uid")] == [PODS]
    cache.found(PODS, objects.pod())
    assert [held.key.name for held in cache.pods_of("job-uid")] == ["tune-train-0-0"]


def test_keys_of_unknown_owners_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST_BARE_KEYS", 3)
    cache = Cache(Clock())
    for number in range(5):
        document = stranger(CONFIG_MAPS)
        document["metadata"]["uid"] = str(number)
        put(cache, CONFIG_MAPS, document)
    assert cache.num_objects()["ConfigMap"] == 3


def test_child_whose_owner_was_taken_off_is_no_child_any_more() -> None:
    cache = filled()
    orphan = objects.batch_job(version=5)
    orphan["metadata"]["ownerReferences"] = []
    assert put(cache, BATCH_JOBS, orphan) == {KEY}
    assert cache.owned(BATCH_JOBS, "job-uid") == []


def test_nothing_unwatched_stays_behind_when_a_job_goes() -> None:
    cache = filled()
    gone: list[str] = []
    cache.job_gone = gone.append
    unlabelled = objects.batch_job(attempt=1, version=7)
    unlabelled["metadata"]["labels"] = {}
    cache.found(BATCH_JOBS, unlabelled)
    vanished(cache, PODS, objects.pod(version=8))
    deleted(cache, JOBS, objects.finetune_job(version=9))
    assert cache.num_objects() == {"FineTuneProfile": 0, "FineTuneJob": 0, "Job": 1, "Pod": 0, "ConfigMap": 0, "Service": 0}
    assert gone == ["job-uid"]
    deleted(cache, BATCH_JOBS, objects.batch_job(version=10))
    assert sum(cache.num_objects().values()) == 0
    assert (len(cache._owned[BATCH_JOBS]), len(cache._owned[PODS]), len(cache._batch_jobs_of), cache._job_of_batch_job) == (
        0,
        0,
        0,
        {},
    )


def test_pod_that_is_seen_only_when_it_is_deleted_is_evidence() -> None:
    cache = Cache(Clock())
    put(cache, JOBS, objects.finetune_job())
    put(cache, BATCH_JOBS, objects.batch_job())
    assert deleted(cache, PODS, objects.pod(version=9)) == {KEY}
    assert [held.is_gone for held in cache.pods_of("job-uid")] == [True]
    cache.forget_evidence("job-uid", lambda _: True)
    assert deleted(cache, PODS, objects.pod(version=9)) == set()
    assert cache.pods_of("job-uid") == []

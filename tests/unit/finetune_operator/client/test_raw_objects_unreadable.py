"""Objects that anybody may write: whatever they hold, nothing raises, and what cannot be read is counted once."""

import asyncio
from copy import deepcopy
from dataclasses import astuple
from datetime import datetime
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune_operator.cache.cache import Cache
from finetune_operator.cache.relist import relist
from finetune_operator.client.kinds import BATCH_JOBS, CACHED, CONFIG_MAPS, JOBS, PODS, PROFILES, SERVICES, JobKey, Kind
from finetune_operator.client.raw_objects import REMEMBERED, UnreadableObjects
from tests.support.examples import examples
from tests.unit.finetune_operator import objects
from tests.unit.finetune_operator.fakes import Clock, FakeApi

INDEX = "batch.kubernetes.io/job-completion-index"
DRAWN = examples(1_200, 6_000)
"""Objects drawn of each of the six kinds: 24,000 altogether."""


class Counted:
    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.cache = Cache(Clock(), UnreadableObjects(self.kinds.append))
        self.cache.take(JOBS, objects.finetune_job())
        self.cache.take(BATCH_JOBS, objects.batch_job())


@pytest.mark.parametrize("index", ["²", "5" * 5000, "-1", "1e3", "٣", " 1", "1_0", ""])
def test_pod_with_an_index_that_is_no_number_is_read_without_it(index: str) -> None:
    seen = Counted()
    pod = objects.pod(index=0)
    pod["metadata"]["annotations"] = {INDEX: index}
    assert seen.cache.take(PODS, pod) == {JobKey("team", "tune")}
    (held,) = seen.cache.pods_of("job-uid")
    assert held.pod.node_rank == 0
    assert seen.kinds == (["Pod"] if index else [])


@pytest.mark.parametrize(
    "changed",
    [
        {
            "conditions": [
                {"type": "DisruptionTarget", "status": "True", "reason": "X", "lastTransitionTime": "0000-01-01T00:00:00Z"}
            ]
        },
        {"startTime": "9999-12-31T23:59:59Z"},
        {"startTime": "tomorrow"},
        {"startTime": 7},
        {"conditions": "none"},
        {"conditions": [None, 3, "x", []]},
    ],
)
def test_batch_job_of_which_part_cannot_be_read_is_still_known(changed: dict[str, Any]) -> None:
    seen = Counted()
    seen.cache.take(BATCH_JOBS, objects.batch_job(attempt=1, version=7, status=changed))
    found = {held.batch_job.name: held.batch_job for held in seen.cache.owned(BATCH_JOBS, "job-uid") if held.batch_job}
    assert found["tune-train-1"].start_time is None


def test_each_version_of_an_object_is_counted_once() -> None:
    seen = Counted()
    pod = objects.pod()
    pod["metadata"]["annotations"] = {INDEX: "²"}
    for version in ("5", "5", "6"):
        pod["metadata"]["resourceVersion"] = version
        seen.cache.read(PODS, pod)
    assert seen.kinds == ["Pod", "Pod"]


def test_what_is_remembered_of_unreadable_objects_is_bounded() -> None:
    unreadable = UnreadableObjects()
    for number in range(REMEMBERED + 10):
        unreadable.note(PODS, {"metadata": {"uid": str(number)}}, ("status",))
    assert len(unreadable._reported) == REMEMBERED


@pytest.mark.parametrize(
    "metadata",
    [None, "x", [], {}, {"uid": 1, "name": "n", "resourceVersion": "1"}, {"uid": "u", "name": "n", "resourceVersion": "²"}],
)
def test_object_without_a_readable_identity_is_left_out_and_counted(metadata: Any) -> None:
    seen = Counted()
    assert seen.cache.read(PODS, {"metadata": metadata}) is None
    assert seen.kinds == ["Pod"]


def test_texts_are_cut_and_the_end_of_a_termination_message_is_kept() -> None:
    seen = Counted()
    ended = {"terminated": {"exitCode": 1, "reason": "r" * 2**20, "message": "x" * 2**20 + "the end"}}
    status = {"phase": "Failed", "containerStatuses": [{"name": "trainer", "state": ended}]}
    seen.cache.take(PODS, objects.pod(status=status))
    (held,) = seen.cache.pods_of("job-uid")
    assert held.pod.termination_message.endswith("the end")
    assert len(held.pod.termination_message) == 4096
    assert len(held.pod.reason) == 256


def test_manifest_nested_deeper_than_any_of_ours_is_kept_without_its_spec() -> None:
    seen = Counted()
    deep: Any = "end"
    for _ in range(9_000):
        deep = {"a": deep}
    seen.cache.take(JOBS, objects.finetune_job(version=3, method={"settings": deep}))
    held = seen.cache.job(JobKey("team", "tune"))
    assert held.document()["spec"] is None
    assert seen.kinds == ["FineTuneJob"]


def test_first_list_and_relist_pass_over_what_cannot_be_read() -> None:
    api: Any = FakeApi()
    pod = api.put(PODS, objects.pod())
    api.objects["Pod", "team", "nameless"] = {"metadata": {"namespace": "team", "uid": "u", "resourceVersion": "²"}}
    api.objects["Pod", "team", "nothing"] = {"metadata": None}
    api.put(JOBS, objects.finetune_job())
    api.put(BATCH_JOBS, objects.batch_job())
    cache = Cache(Clock())

    async def scenario() -> None:
        await relist(api, cache, ())
        await relist(api, cache, ())

    asyncio.run(scenario())
    assert [held.key.uid for held in cache.pods_of("job-uid")] == [pod["metadata"]["uid"]]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [found for name, item in inner for found in paths_of(item, (*path, name))]


def full(kind: Kind) -> dict[str, Any]:
    """An object in which every value that is read is there."""
    moment = objects.CREATED
    condition = {"type": "Failed", "status": "True", "reason": "r", "message": "m", "lastTransitionTime": moment}
    state = {
        "terminated": {"exitCode": 1, "reason": "r", "message": "m", "startedAt": moment, "finishedAt": moment},
        "running": {"startedAt": moment},
        "waiting": {"reason": "r"},
    }
    gone = {"deletionTimestamp": moment, "deletionGracePeriodSeconds": 30}
    made: dict[Kind, dict[str, Any]] = {
        JOBS: objects.finetune_job(
            version=2,
            status={"phase": "p", "attempt": 1, "conditions": [condition], "attempts": [{"outcome": "o", "failure": "f"}]},
            profile="p",
        ),
        PROFILES: {"metadata": {"name": "p", "uid": "p", "resourceVersion": "2"}, "spec": {"trainerImage": "i"}},
        BATCH_JOBS: objects.batch_job(
            version=2, spec={"suspend": True}, status={"startTime": moment, "conditions": [condition, condition]}
        ),
        PODS: objects.pod(
            version=2,
            status={
                "phase": "Failed",
                "reason": "r",
                "podIP": "10.0.0.1",
                "conditions": [
                    {**condition, "type": "DisruptionTarget"},
                    {**condition, "type": "PodScheduled", "status": "False"},
                ],
                "containerStatuses": [{"name": "trainer", "state": state}],
                "initContainerStatuses": [{"name": "i", "state": state}],
            },
        ),
        CONFIG_MAPS: {
            "metadata": {**objects.batch_job()["metadata"], "resourceVersion": "2", "uid": "map"},
            "data": {"plan.json": "{}"},
        },
        SERVICES: {"metadata": {**objects.batch_job()["metadata"], "resourceVersion": "2", "uid": "service"}},
    }
    document = made[kind]
    document["metadata"] |= {**gone, "annotations": {INDEX: "1"}, "generation": 1}
    if kind is PODS:
        document["spec"] = {"nodeName": "n"}
    return document


Changes = list[tuple[tuple[Any, ...], Any]]


def take_in_and_remove(kind: Kind, changes: Changes) -> None:
    seen = Counted()
    document = full(kind)
    for path, value in changes:
        target: Any = document
        try:
            for step in path[:-1]:
                target = target[step]
            target[path[-1]] = value
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change has taken the place of this one away
    held = seen.cache.read(kind, document)
    if held is None:
        return
    seen.cache.apply(kind, held)
    view = held.pod or held.batch_job
    for time in (value for value in astuple(view) if isinstance(value, datetime)) if view else ():
        assert time.tzinfo is not None
        assert 1968 < time.year < 2200
    seen.cache.remove(kind, held)


HOSTILE: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**31, 2**63, 10**400, 0.5, 1e308, "", "True", "²", "9" * 5000, "-0", "\u0000", "\ud800", "x" * 10_000),
    *("0000-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "2026-01-01", "2026-01-01T00:00:00+23:59", "now"),
    *([], {}, [[]], [None, 1, "x", {}], {"a": None}, [{"type": 1}, {"type": "Failed", "status": "True"}] * 200),
)


@pytest.mark.parametrize("kind", CACHED, ids=lambda kind: kind.name)
def test_no_object_raises_whatever_it_contains(kind: Kind) -> None:
    random = Random(kind.name)
    paths = paths_of(full(kind))
    for _ in range(DRAWN):
        take_in_and_remove(kind, [(random.choice(paths), deepcopy(random.choice(HOSTILE))) for _ in range(random.randint(1, 3))])


@pytest.mark.parametrize("kind", CACHED, ids=lambda kind: kind.name)
def test_no_object_raises_whatever_is_made_up(kind: Kind) -> None:
    changes = st.lists(st.tuples(st.sampled_from(paths_of(full(kind))), anything), min_size=1, max_size=2)

    @settings(max_examples=50, deadline=None, database=None)
    @given(changes)
    def made_up(drawn: Changes) -> None:
        take_in_and_remove(kind, drawn)

    made_up()

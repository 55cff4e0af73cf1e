"""What is kept of Warning events, however many somebody writes about whatever."""

from random import Random
from typing import Any

import pytest

from finetune_operator.cache import warning_events as module
from finetune_operator.cache.cache import Cache
from finetune_operator.cache.warning_events import PER_OBJECT, WarningEvents
from finetune_operator.client.kinds import BATCH_JOBS, JOBS, PODS, JobKey
from tests.unit.finetune_operator import objects
from tests.unit.finetune_operator.fakes import Clock
from tests.unit.finetune_operator.passes.test_gather import warning

KEY = JobKey("team", "tune")
POD = "tune-train-0-0-uid"


def known() -> WarningEvents:
    cache = Cache(Clock())
    for kind, document in ((JOBS, objects.finetune_job()), (BATCH_JOBS, objects.batch_job()), (PODS, objects.pod())):
        cache.take(kind, document)
    return WarningEvents(cache)


def at(second: int, event: dict[str, Any]) -> dict[str, Any]:
    return event | {"lastTimestamp": f"2026-01-02T03:04:{second:02}Z"}


def test_job_is_woken_by_a_new_reason_and_not_by_each_repetition_of_it() -> None:
    events = known()
    assert events.take(at(1, warning("Pod", POD, "FailedScheduling", "0/3 nodes are available"))) == KEY
    assert events.take(at(2, warning("Pod", POD, "FailedScheduling", "0/3 nodes are available"))) is None
    assert events.take(at(3, warning("Pod", POD, "FailedScheduling", "0/4 nodes are available"))) is None
    assert events.take(at(4, warning("Pod", POD, "FailedMount", "no secret"))) == KEY
    assert events.about("team", POD)[-2:] == ("FailedScheduling: 0/4 nodes are available", "FailedMount: no secret")


def test_newest_few_are_kept_latest_last_whatever_order_they_come_in() -> None:
    events = known()
    for second in (3, 9, 1, 5, 8, 2, 7):
        events.take(at(second, warning("Job", "tune-train-0-uid", f"R{second}", "m")))
    assert events.about("team", "tune-train-0-uid") == ("R3: m", "R5: m", "R7: m", "R8: m", "R9: m")
    assert PER_OBJECT == 5


def test_event_in_another_namespace_is_not_about_our_pod() -> None:
    events = known()
    assert events.take(warning("Pod", POD, "FailedMount", "forged", namespace="another")) is None
    assert events.about("team", POD) == ()


@pytest.mark.parametrize(
    "changed", [{"type": "Normal"}, {"involvedObject": {"kind": "Node", "uid": POD}}, {"involvedObject": None}]
)
def test_other_events_are_passed_over(changed: dict[str, Any]) -> None:
    events = known()
    assert events.take(warning("Pod", POD, "FailedMount", "m") | changed) is None
    assert events.about("team", POD) == ()


def test_event_that_comes_before_its_pod_is_there_once_the_pod_is() -> None:
    events = WarningEvents(Cache(Clock()))
    assert events.take(warning("Pod", POD, "FailedMount", "m")) is None
    assert events.about("team", POD) == ("FailedMount: m",)


def test_memory_is_bounded_and_strangers_take_nothing_from_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CHARACTERS_OF_OTHERS", 5_000)
    events = known()
    events.take(warning("Pod", POD, "FailedMount", "m" * 10_000))
    for number in range(1_000):
        events.take(warning("Pod", f"strange-{number}", "R", "x" * 2_000))
    assert [len(text) for text in events.about("team", POD)] == [len("FailedMount: ") + 1024]
    assert events._others._size <= 5_000
    assert len(events._others._by_object) == 4
    assert events._others._size == sum(len(text) for texts in events._others._by_object.values() for text in texts)


def test_size_is_counted_right_whatever_comes() -> None:
    random = Random(8)
    texts = module._BoundedTexts(500)
    for _ in range(5_000):
        of = ("team", str(random.randrange(20)))
        texts.put(of, str(random.randrange(3)), "x" * random.randrange(1, 40), str(random.randrange(9)))
        assert texts._size == sum(len(text) for known in texts._by_object.values() for text in known)
        assert texts._size <= 500


@pytest.mark.parametrize("value", [None, 1, "x", [], {"a": 1}, 2**70, "²" * 5_000])
def test_no_event_raises(value: Any) -> None:
    events = known()
    full = warning("Pod", POD, "R", "m") | {"series": {"lastObservedTime": "t"}, "eventTime": "t"}
    for name in full:
        events.take(full | {name: value})
        if isinstance(full[name], dict):
            for inner in full[name]:
                events.take(full | {name: full[name] | {inner: value}})
    events.take(value)
    assert events.about("team", POD)

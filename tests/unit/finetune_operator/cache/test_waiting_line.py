"""Places in the line of a profile with `maxActiveJobs`, and whose turn has come when somebody leaves."""

from datetime import timedelta
from typing import Any

from finetune_operator.cache.cache import Cache
from finetune_operator.cache.projection import CachedObject
from finetune_operator.client.kinds import JOBS, PROFILES, JobKey
from finetune_operator.decide.seen.observed import PlaceInLine
from tests.unit.finetune_operator import objects
from tests.unit.finetune_operator.fakes import Clock
from tests.unit.finetune_operator.passes.test_gather import NOW, Scene

STARTED = {"startTime": objects.CREATED}
FINISHED = STARTED | {"conditions": [{"type": "Finished", "status": "True"}]}
STALLED = {"conditions": [{"type": "Stalled", "status": "True"}]}


def job(name: str, second: int, version: int = 1, status: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    document = objects.finetune_job(version=version, status=status, uid=name, **spec)
    document["metadata"] |= {"name": name, "creationTimestamp": f"2026-01-02T03:04:{second:02}Z"}
    return document


def profile(limit: int | None, version: int = 1) -> dict[str, Any]:
    spec = {"trainerImage": "image:1", **({} if limit is None else {"maxActiveJobs": limit})}
    return {"metadata": {"name": "default", "uid": "p", "resourceVersion": str(version)}, "spec": spec}


class Team:
    def __init__(self, limit: int = 2) -> None:
        self.cache = Cache(Clock())
        self.turns: list[str] = []
        self.cache.lines.turn_has_come = lambda key: self.turns.append(key.name)
        self.cache.take(PROFILES, profile(limit))

    def ahead(self, name: str) -> int:
        return self.cache.lines.ahead_of(self.held(name))

    def held(self, name: str) -> CachedObject:
        held = self.cache.job(JobKey("team", name))
        assert held is not None
        return held

    def woken(self, document: dict[str, Any]) -> list[str]:
        self.turns.clear()
        self.cache.take(JOBS, document)
        return self.turns


def test_older_jobs_and_active_ones_are_ahead() -> None:
    team = Team()
    for name, second in (("c", 3), ("a", 1), ("b", 1)):
        team.cache.take(JOBS, job(name, second))
    assert [team.ahead(name) for name in "abc"] == [0, 1, 2]
    team.cache.take(JOBS, job("young", 59, status=STARTED))
    assert [team.ahead(name) for name in "abc"] == [1, 2, 3]


def test_what_cannot_start_holds_nobody_up() -> None:
    team = Team()
    for name, status, spec in (
        ("suspended", None, {"run": {"suspend": True}}),
        ("cancelled", None, {"run": {"cancel": True}}),
        ("stalled", STALLED, {}),
        ("finished", FINISHED, {}),
        ("elsewhere", STARTED, {"profile": "other"}),
    ):
        team.cache.take(JOBS, job(name, 1, status=status, **spec))
    foreign = job("foreign", 1)
    foreign["metadata"]["namespace"] = "another"
    team.cache.take(JOBS, foreign)
    team.cache.take(JOBS, job("a", 9))
    assert team.ahead("a") == 0


def test_job_that_finishes_wakes_the_one_whose_turn_it_is() -> None:
    team = Team(limit=2)
    for name, second in (("one", 1), ("two", 2)):
        team.cache.take(JOBS, job(name, second, status=STARTED))
    for name, second in (("a", 3), ("b", 4), ("c", 5)):
        team.cache.take(JOBS, job(name, second))
    assert team.woken(job("one", 1, version=2, status=FINISHED)) == ["a"]
    assert team.woken(job("a", 3, version=2, status=STARTED)) == []
    assert team.cache.remove(JOBS, team.held("two")) == {JobKey("team", "two")}
    assert team.turns == ["b"]


def test_job_that_leaves_the_line_wakes_those_who_may_start_then() -> None:
    team = Team(limit=2)
    for name, second in (("a", 1), ("b", 2), ("c", 3), ("d", 4)):
        team.cache.take(JOBS, job(name, second))
    assert team.woken(job("b", 2, version=2, status=STALLED)) == ["a", "c"]
    assert team.woken(job("b", 2, version=3)) == []
    assert team.ahead("c") == 2


def test_no_limit_wakes_nobody_and_a_new_one_wakes_all() -> None:
    team = Team()
    team.cache.take(PROFILES, profile(None, version=2))
    team.cache.take(JOBS, job("one", 1, status=STARTED))
    team.cache.take(JOBS, job("a", 2))
    assert team.woken(job("one", 1, version=2, status=FINISHED)) == []
    assert team.cache.take(PROFILES, profile(1, version=3)) == {JobKey("team", "a")}


def test_pass_of_a_waiting_job_sees_its_place_and_a_started_one_none() -> None:
    scene = Scene()
    scene.add(PROFILES, profile(1))
    scene.add(JOBS, job("other", 1, status=STARTED))
    gathered = scene.gather()
    assert gathered.observed.line == PlaceInLine(limit=1, ahead=1)
    assert gathered.revisit_after_seconds is not None
    scene.add(JOBS, objects.finetune_job(status=STARTED | {"plan": {"hash": "h"}}))
    assert scene.gather(NOW).observed.line is None


def test_deleted_job_that_a_finalizer_holds_is_not_in_the_line() -> None:
    team = Team(limit=1)
    team.cache.take(JOBS, job("a", 1))
    team.cache.take(JOBS, job("b", 2))
    going = job("a", 1, version=2)
    going["metadata"] |= {"deletionTimestamp": objects.CREATED, "finalizers": ["example.com/hold"]}
    assert team.woken(going) == ["b"]
    assert team.ahead("b") == 0


def test_a_place_is_reported_again_after_twenty_seconds_and_a_turn_that_has_come_at_once() -> None:
    scene = Scene()
    scene.add(PROFILES, profile(1))
    scene.add(JOBS, job("other", 1, status=STARTED))

    def ahead(seconds: int) -> int | None:
        line = scene.gather(NOW + timedelta(seconds=seconds)).observed.line
        return None if line is None else line.ahead

    assert ahead(0) == 1
    scene.add(JOBS, job("older", 2))
    assert [ahead(second) for second in (0, 19, 20)] == [1, 1, 2]
    scene.add(JOBS, job("third", 3))
    assert [ahead(second) for second in (39, 40)] == [2, 3]
    for name, second in (("older", 2), ("third", 3)):
        scene.add(JOBS, job(name, second, version=9, status=STALLED))
    assert ahead(41) == 3
    scene.add(JOBS, job("other", 1, version=9, status=FINISHED))
    assert ahead(42) == 0
    scene.add(JOBS, job("late", 4, version=9, status=STARTED))
    assert ahead(43) == 1
    # A larger limit counts at once.
    scene.add(PROFILES, profile(2, version=9))
    assert scene.gather(NOW + timedelta(seconds=44)).observed.line == PlaceInLine(limit=2, ahead=1)

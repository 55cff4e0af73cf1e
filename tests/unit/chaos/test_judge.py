"""The judge of `make chaos` is judged: it sees what it must, and nothing where nothing is."""

from typing import Any

import pytest

from tests.chaos.oracle import Moment, Oracle
from tests.chaos.player import STORIES, wrong_end


def moment(version: int, kind: str, gang: str, is_alive: bool, attempt: str = "0", uid: str = "") -> Moment:
    return Moment(version, kind, uid or gang, "chaos-1/uid", "train", attempt, gang, is_alive)


def judged(*moments: Moment) -> list[str]:
    oracle = Oracle(kube=None, namespace="")  # type: ignore[arg-type]
    oracle._moments = list(moments)
    return oracle.violations()


FIRST = (
    moment(1, "Job", "first", True),
    moment(2, "Pod", "first", True, uid="pod"),
    moment(3, "Job", "first", False),
    moment(5, "Pod", "first", False, uid="pod"),
)


def test_gang_that_begins_when_the_last_pod_of_the_earlier_one_has_ended_is_none_too_many() -> None:
    assert judged(moment(6, "Job", "second", True, "1"), *FIRST) == []


def test_gang_that_begins_while_a_pod_of_the_earlier_one_lives_is_seen() -> None:
    (found,) = judged(*FIRST, moment(4, "Job", "second", True, "1"))
    assert found.startswith("chaos-1/uid: more than one gang of train at 4")


def test_attempt_that_is_made_twice_is_seen_even_if_never_at_the_same_time() -> None:
    (found,) = judged(*FIRST, moment(6, "Job", "second", True, "0"))
    assert found == "('chaos-1/uid', 'train', '0'): made 2 times"


def job(phase: str, finished: str = "True", **restarts: int) -> dict[str, Any]:
    return {"status": {"phase": phase, "restarts": restarts, "conditions": [{"type": "Finished", "status": finished}]}}


@pytest.mark.parametrize(
    ("story", "found", "attempts", "verdict"),
    [
        ("plain", job("Succeeded"), 1, ""),
        ("plain", job("Training", "False"), 1, "unfinished"),
        ("plain", None, 1, "lost"),
        ("plain", job("Failed"), 1, "wrong"),
        ("plain", job("Succeeded", uncounted=1), 1, "wrong"),
        ("plain", job("Succeeded"), 2, "wrong"),
        ("restarted", job("Succeeded", counted=1), 2, ""),
        ("preempted", job("Succeeded", counted=1), 2, "wrong"),
        ("deleted", None, 1, ""),
        ("deleted", job("Succeeded"), 1, "unfinished"),
    ],
)
def test_ends_are_told_apart(story: str, found: dict[str, Any] | None, attempts: int, verdict: str) -> None:
    assert wrong_end(STORIES[story], found, attempts).partition(":")[0] == verdict

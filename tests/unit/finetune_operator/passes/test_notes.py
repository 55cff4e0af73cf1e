"""What is noted of a create that the API server refuses."""

from datetime import UTC, datetime, timedelta

import pytest

from finetune_operator.client.answers import ApiError
from finetune_operator.passes.notes import refused_write

NOW = datetime(2026, 1, 2, tzinfo=UTC)
CHILD = ("Job", "tune-train-0")


def refusal(code: int = 403, retry_after: float = 0.0) -> ApiError:
    return ApiError("POST", code, "Forbidden", "exceeded quota", retry_after)


def test_pauses_double_up_to_five_minutes() -> None:
    write, pauses = None, []
    for _ in range(8):
        write = refused_write(write, CHILD, refusal(), NOW, lambda: 1.0)
        pauses.append((write.retry_at - NOW).total_seconds())
    assert pauses == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]


@pytest.mark.parametrize(("draw", "tries", "seconds"), [(0.0, 1, 5.0), (0.0, 3, 15.0), (0.5, 3, 17.5)])
def test_pauses_are_spread_below_their_length(draw: float, tries: int, seconds: float) -> None:
    write = None
    for _ in range(tries):
        write = refused_write(write, CHILD, refusal(), NOW, lambda: draw)
    assert write.retry_at == NOW + timedelta(seconds=seconds)


def test_the_server_is_given_the_pause_that_it_asks_for() -> None:
    assert refused_write(None, CHILD, refusal(retry_after=29.0), NOW, lambda: 0.0).retry_at == NOW + timedelta(seconds=29)


def test_the_first_pause_for_another_child_is_the_shortest_again() -> None:
    write = None
    for _ in range(8):
        write = refused_write(write, CHILD, refusal(), NOW, lambda: 1.0)
    write = refused_write(write, ("Job", "tune-merge-0"), refusal(), NOW, lambda: 1.0)
    assert (write.retry_at - NOW).total_seconds() == 5.0

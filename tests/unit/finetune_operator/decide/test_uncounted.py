"""How long accounts may hold up a job."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from finetune_operator.decide.uncounted import continues_uncounted, failing_since

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "is_refusal", "expected"), [(0, True, True), (0, False, False), (119, False, False), (120, False, True)]
)
def test_a_refusal_is_not_waited_for_and_nothing_is_for_longer_than_two_minutes(
    seconds: int, is_refusal: bool, expected: bool
) -> None:
    assert continues_uncounted(NOW, NOW + timedelta(seconds=seconds), is_refusal=is_refusal) is expected


def test_the_first_failure_of_a_row_is_when_it_begins_and_a_clock_that_is_set_back_does_not_prolong_it() -> None:
    earlier, later = NOW - timedelta(hours=1), NOW + timedelta(hours=1)
    assert failing_since(None, NOW) == NOW
    assert failing_since(earlier, NOW) == earlier
    assert failing_since(later, NOW) == NOW

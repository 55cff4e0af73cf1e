"""A few publications to the Hub that are killed; `python -m tests.kill.publish_hub` does as many as one likes."""

from __future__ import annotations

import pytest

from tests.kill.publish_hub import run


@pytest.mark.nightly  # The kill suite does the same with other moments.
def test_killed_publications_show_all_or_nothing_and_go_on_where_they_were():
    outcomes = run(runs=6, seed=7)
    assert [outcome.problem for outcome in outcomes if outcome.problem] == []
    assert sum(sum(outcome.landed.values()) - outcome.landed["late"] for outcome in outcomes) >= 6

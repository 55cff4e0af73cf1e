"""The replay of spot nodes: an hour without a node, with and without an elastic gang, counted by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.spot.replay import ROUND_SECONDS, Account, Replay, Workload
from bench.spot.trace import Event, Market, drawn, recorded

WORKLOAD = Workload(nodes=2, node_hours=1.0, startup_seconds=60, save_seconds=5, interval_seconds=300, is_adaptive=False)
AWAY = [Event(900.0, 1, comes=False), Event(4500.0, 1, comes=True)]
"""Node 1 is taken back after a quarter of an hour, without notice, and comes back an hour later."""


def replayed(fewest: int | None, events: list[Event], workload: Workload = WORKLOAD) -> Account:
    return Replay(workload, fewest, events, seed=1).run(4 * 3600.0)


def test_an_elastic_gang_works_while_one_of_fixed_size_waits() -> None:
    fixed, elastic = replayed(None, AWAY), replayed(1, AWAY)
    assert fixed.is_done
    assert elastic.is_done
    # At least two saves of 300 s on two nodes are there by then, so 2,400 node seconds are left: 40 minutes on one node.
    assert elastic.seconds < 4500 < fixed.seconds
    for account in (fixed, elastic):
        assert account.productive == pytest.approx(3600, abs=2 * ROUND_SECONDS)
        # At most what two nodes do between two saves.
        assert 0 < account.lost <= 2 * (300 + ROUND_SECONDS)
        spent = account.productive + account.lost + account.starting + account.saving
        assert account.held >= spent - 2 * ROUND_SECONDS
        assert account.saving > 0
        assert account.losses == 1
    assert elastic.held < fixed.held, "the other node of a gang of fixed size is held in vain"


def test_steps_wait_for_saves() -> None:
    """All nodes stay. One node hour on two nodes is 1,800 s; five saves of 60 s come before the last step."""
    free, dear = (replayed(None, [], replace(WORKLOAD, save_seconds=seconds)) for seconds in (0.0, 60.0))
    assert dear.seconds - free.seconds == pytest.approx(5 * 60, abs=2 * ROUND_SECONDS)
    assert (free.saving, dear.saving) == (0.0, 5 * 60 * 2)


def test_a_notice_that_is_long_enough_loses_nothing() -> None:
    told = [Event(AWAY[0].at, 1, comes=False, notice=120.0), AWAY[1]]
    assert (replayed(1, told).lost, replayed(1, told).losses) == (0.0, 0)
    assert replayed(1, [Event(AWAY[0].at, 1, comes=False, notice=10.0), AWAY[1]]).lost > 0


def test_a_drawn_trace_is_the_same_each_time_and_nodes_come_only_after_they_went() -> None:
    market = Market(hours_there=2, hours_away=1, share_with_notice=0.5, notice_seconds=30)
    trace = drawn(market, 3, 100_000, seed=7)
    assert trace == drawn(market, 3, 100_000, seed=7) != drawn(market, 3, 100_000, seed=8)
    for node in range(3):
        kinds = [event.comes for event in trace if event.node == node]
        assert kinds == [bool(number % 2) for number in range(len(kinds))]
    assert {event.notice for event in trace if not event.comes} == {0.0, 30.0}


def test_a_recorded_trace_is_read_or_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("seconds,node,event,notice\n4500,1,comes,\n900,1,goes,30\n")
    assert recorded(path) == [Event(900.0, 1, comes=False, notice=30.0), Event(4500.0, 1, comes=True)]
    path.write_text("seconds,node,event\n900,1,leaves\n")
    with pytest.raises(ValueError, match=r"trace\.csv, line 2: .*leaves.*comes or goes"):
        recorded(path)

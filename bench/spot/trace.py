"""When spot nodes are there: a trace is a list of (seconds, node, whether it comes or goes), recorded or drawn."""

from __future__ import annotations

import csv
import random
from dataclasses import dataclass
from pathlib import Path

HOUR = 3600.0


@dataclass(frozen=True)
class Event:
    """A node comes, or is taken back; `notice`: seconds between the word of that and the loss, 0 if there is none."""

    at: float
    node: int
    comes: bool
    notice: float = 0.0


@dataclass(frozen=True)
class Market:
    """How long nodes stay and how long they are away, in mean; times are drawn from exponential distributions."""

    hours_there: float
    hours_away: float
    share_with_notice: float
    notice_seconds: float


def drawn(market: Market, num_nodes: int, seconds: float, seed: int) -> list[Event]:
    """All nodes are there at first."""
    events: list[Event] = []
    for node in range(num_nodes):
        rng = random.Random(f"{seed} {node}")
        at, is_there = 0.0, True
        while True:
            at += rng.expovariate(1 / ((market.hours_there if is_there else market.hours_away) * HOUR))
            if at >= seconds:
                break
            notice = market.notice_seconds if is_there and rng.random() < market.share_with_notice else 0.0
            events.append(Event(at, node, not is_there, notice))
            is_there = not is_there
    return sorted(events, key=lambda event: (event.at, event.node))


def recorded(path: Path) -> list[Event]:
    """A CSV file with the columns seconds, node (a number from 0), event (`comes` or `goes`) and, if there is one, notice.

    Raises ValueError with the line for anything else.
    """
    events = []
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                kinds = {"comes": True, "goes": False}
                events.append(Event(float(row["seconds"]), int(row["node"]), kinds[row["event"]], float(row.get("notice") or 0)))
            except (KeyError, TypeError, ValueError) as error:
                message = f"{path}, line {number}: {error!r}; write seconds, node, event (comes or goes) and notice"
                raise ValueError(message) from error
    return sorted(events, key=lambda event: (event.at, event.node))

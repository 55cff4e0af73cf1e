"""`python -m bench.spot [--runs N] [--trace FILE]`: an elastic gang on spot nodes next to one of fixed size, on the same trace.

The operator is the real one, the cluster is simulated, and training is played (`bench/spot/replay.py`): hours of the wall, node
hours that were paid for, and the share of them that went into steps that count. Says nothing of a real machine's speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.spot.replay import Account, Replay, Workload
from bench.spot.trace import HOUR, Event, Market, drawn, recorded
from finetune_operator.logs import configure_logs

RESULTS = Path(__file__).parents[1] / "results" / "spot.json"
WORKLOAD = Workload(nodes=8, node_hours=96, startup_seconds=120, save_seconds=5, interval_seconds=1800, is_adaptive=False)
MARKET = Market(hours_there=12, hours_away=2, share_with_notice=0.5, notice_seconds=120)
MOST_HOURS = 240.0
"""What is not done by then is said to be not done."""


def main() -> int:
    configure_logs("ERROR")  # the operator tells of each decision
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="traces that are drawn")
    parser.add_argument("--trace", type=Path, help="a recorded one instead: CSV with seconds, node, event, notice")
    parser.add_argument("--node-hours", type=float, default=WORKLOAD.node_hours, help="of work that the job needs")
    parser.add_argument("--keep-results", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    workload = replace(WORKLOAD, node_hours=arguments.node_hours)
    if arguments.trace is not None:
        traces = [recorded(arguments.trace)]
    else:
        traces = [drawn(MARKET, workload.nodes, MOST_HOURS * HOUR, seed) for seed in range(arguments.runs)]
    contenders: dict[str, tuple[Workload, int | None]] = {
        "fixed size": (workload, None),
        "elastic": (workload, 1),
        "elastic, adaptive saves": (replace(workload, is_adaptive=True), 1),
    }
    found = {
        name: [replay(*settings, events, number) for number, events in enumerate(traces)] for name, settings in contenders.items()
    }
    summary = {name: summarize(accounts) for name, accounts in found.items()}
    print(
        f"{workload.node_hours:g} node hours of work on {workload.nodes} spot nodes, {len(traces)} traces; median (least to most)"
    )
    for name, figures in summary.items():
        print(f"  {name:24s} " + ", ".join(f"{title} {text(values)}" for title, values in figures.items()))
    fixed, elastic = summary["fixed size"]["hours"], summary["elastic"]["hours"]
    print(f"  elastic is done in {statistics.median(elastic) / statistics.median(fixed):.2f} of the hours")
    if arguments.keep_results:
        RESULTS.write_text(json.dumps({"workload": vars(workload), "market": vars(MARKET), "results": summary}, indent=2) + "\n")
    return 0 if all(account.is_done for accounts in found.values() for account in accounts) else 1


def replay(workload: Workload, fewest: int | None, events: list[Event], seed: int) -> Account:
    return Replay(workload, fewest, events, seed).run(MOST_HOURS * HOUR)


def summarize(accounts: list[Account]) -> dict[str, list[float]]:
    """By figure, one value for each trace."""
    figures: dict[str, Any] = {
        "hours": lambda account: account.seconds / HOUR,
        "node hours": lambda account: account.held / HOUR,
        "goodput": lambda account: account.goodput,
        "lost node hours": lambda account: account.lost / HOUR,
        "attempts": lambda account: account.attempts,
        "not done": lambda account: not account.is_done,
    }
    return {name: [round(float(figure(account)), 3) for account in accounts] for name, figure in figures.items()}


def text(values: list[float]) -> str:
    return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


if __name__ == "__main__":
    sys.exit(main())

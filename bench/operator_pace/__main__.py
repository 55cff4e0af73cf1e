"""`python -m bench.operator_pace [--jobs N]`: pace and cost of the operator process on a real API server.

One control plane, one operator with the rights of the chart, N jobs: what the same API server does without an operator (floor),
a burst of N lives, a restart, up to 1,000 jobs whose pods find no room, newcomers at a steady rate among them, and an API server
that is killed. The targets are those of two idle cores on which 1,000 floors take 4.3 s.
Prints every figure beside its threshold and writes `bench/results/operator.json`. Ends with 1 where a threshold is not kept.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from bench.operator_pace import scenarios
from bench.operator_pace.client import Client
from bench.operator_pace.measuring import calibration_ms, cpu_seconds
from bench.operator_pace.plane import MeasuredPlane
from bench.operator_pace.report import exceeded, table
from tests.integration.conftest import RELEASE, SYSTEM
from tests.integration.operator_process import OperatorProcess

RESULTS = Path(__file__).parents[1] / "results" / "operator.json"
SCENARIOS = ("floor", "burst", "restart", "pending")


async def measure(plane: MeasuredPlane, operator: OperatorProcess, options: argparse.Namespace) -> dict[str, Any]:
    """All scenarios that were asked for."""
    async with Client(plane.kubeconfig) as client:
        num_jobs: int = options.jobs
        stage = scenarios.Stage(plane, client, operator, num_jobs, patience=120.0 + num_jobs)
        work = asyncio.create_task(_all(stage, options))
        watchdog = asyncio.create_task(scenarios.died(stage))
        done, _ = await asyncio.wait((work, watchdog), return_when=asyncio.FIRST_COMPLETED)
        for task in (work, watchdog):
            task.cancel()
        for task in done:
            task.result()
        return stage.results


async def _all(stage: scenarios.Stage, options: argparse.Namespace) -> None:
    num_pending = min(stage.num_jobs, 1000)
    await scenarios.ready(stage)
    for name, scenario in (
        ("floor", lambda: scenarios.floor(stage)),
        ("burst", lambda: scenarios.burst(stage)),
        ("restart", lambda: scenarios.restart(stage)),
        ("pending", lambda: scenarios.pending(stage, num_pending, options.idle_seconds, options.steady_seconds, options.rate)),
    ):
        if name in options.only:
            await scenario()


def main() -> int:
    """Measure and print; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=SCENARIOS)
    parser.add_argument("--idle-seconds", type=float, default=300.0, help="how long the pending jobs are only watched")
    parser.add_argument("--steady-seconds", type=float, default=60.0)
    parser.add_argument(
        "--rate",
        type=float,
        help="newcomers a second among the pending; unset: as hard for this machine as 20 a second for the "
        "one of the targets, by the floor",
    )
    parser.add_argument("--operator-log", type=Path, help="where the operator's log is kept; unset: nowhere")
    parser.add_argument(
        "--without-thresholds", action="store_true", help="judge nothing: a few jobs show that it runs, and no pace"
    )
    parser.add_argument("--keep-results", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    load, begun, calibration = os.getloadavg(), time.monotonic(), calibration_ms()
    with MeasuredPlane() as plane:
        arguments = (f"--lease-namespace={SYSTEM}", f"--lease-name={RELEASE}", "--identity=bench")
        operator = OperatorProcess(plane.operator_kubeconfig, options.operator_log or plane.run.path / "operator.log", *arguments)
        with operator:
            results = asyncio.run(measure(plane, operator, options))
        api_server_cpu = cpu_seconds(plane.api_server.process.pid)
    results["machine"] = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "calibration_ms_before": calibration,
        "calibration_ms_after": calibration_ms(),
        "load_before": load[0],
        "load_after": os.getloadavg()[0],
        "api_server_cpu_seconds": api_server_cpu,
        "harness_cpu_seconds": cpu_seconds(os.getpid()),
        "minutes": (time.monotonic() - begun) / 60,
    }
    print(table({"machine": results["machine"]}, options.jobs))
    if options.keep_results:
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps(known | {str(options.jobs): results}, indent=1) + "\n")
    is_judged = options.only == SCENARIOS and not options.without_thresholds
    broken = exceeded(results, options.jobs) if is_judged else []
    for line in broken:
        print(line, file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tests.e2e.failures [--only NAME...]`: the table of failures on two real nodes.

Prints the table and keeps it in docs/how-to/results.md. The exit code is 1 when a case did not come out as expected, 2 where this
machine cannot run nodes.
"""

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tests.e2e.failures import absences, node_faults, rank_faults
from tests.e2e.failures.case import Case, Outcome
from tests.e2e.failures.scene import Scene
from tests.e2e.failures.table import record, table
from tools.cluster.errors import ClusterError
from tools.cluster.requirements import unsupported_reason
from tools.stack import Stack

CASES: tuple[Case, ...] = (*rank_faults.CASES, *node_faults.CASES, *absences.CASES)


def play(stack: Stack, case: Case, logs: Path) -> tuple[Outcome | None, list[str]]:
    """Play one case and put everything back.

    Returns what was seen, and what is not as expected; where something is not, `logs` has a file that explains it.
    """
    scene = Scene(stack, case.name)
    outcome = None
    try:
        case.play(scene)
        outcome = scene.finish()
        differences = outcome.differences(case.expected)
    except ClusterError as error:
        differences = [str(error)]
    if differences:
        with (logs / f"{case.name}.log").open("w") as log:
            stack.describe(log.write)
    try:
        scene.leave()
    except ClusterError as error:
        differences.append(str(error))
    return outcome, differences


def _end(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(f"failures: ended by {signal.Signals(number).name}")


def main() -> int:
    """Returns the exit code."""
    signal.signal(signal.SIGTERM, _end)  # an orderly end, which removes the nodes
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.failures", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--no-record", action="store_true", help="print the table and keep nothing")
    arguments = parser.parse_args()
    reason = unsupported_reason()
    if reason is not None:
        print(f"failures: no real nodes here: {reason}", file=sys.stderr)
        return 2
    chosen = [case for case in CASES if case.name in arguments.only]
    outcomes: dict[str, Outcome] = {}
    wrong: dict[str, list[str]] = {}
    logs = Path(tempfile.mkdtemp(prefix="finetune-failures-"))
    with Stack(nodes=2) as stack:
        for case in chosen:
            start = time.monotonic()
            outcome, differences = play(stack, case, logs)
            if outcome is not None:
                outcomes[case.name] = outcome
            if differences:
                wrong[case.name] = differences
                stack.cluster.keep_logs = True
            elif outcome is not None and not arguments.no_record:
                record({case.name: outcome}, CASES)
            print(f"{case.name}: {'; '.join(differences) or 'as expected'} ({time.monotonic() - start:.0f} s)", flush=True)
    print(f"\n{table(outcomes, chosen)}\n")
    if wrong:
        print(f"failures: not as expected: {', '.join(wrong)}; see {logs}", file=sys.stderr)
        return 1
    logs.rmdir()
    return 0


if __name__ == "__main__":
    sys.exit(main())

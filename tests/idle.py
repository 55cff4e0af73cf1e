"""An operator with nothing to do: `python -m tests.idle` watches one on an empty cluster for 15 minutes and prints its requests.

Fails if the process ends, becomes unhealthy, or asks more of the API server than one request a second. By day
tests/integration/test_watched_objects.py watches one past its first relist.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.integration.operator_process import OperatorProcess
from tests.support.audited_plane import AuditedPlane

MOST_REQUESTS_A_SECOND = 1.0


def watch_idle_operator(plane: AuditedPlane, operator: OperatorProcess, seconds: float) -> Counter[str]:
    """The requests of these seconds, by verb and resource. Raises AssertionError for what an idle operator must not do."""
    operator.wait_for_line("ready")
    before, begun = plane.requests(), time.monotonic()
    while time.monotonic() < begun + seconds:
        time.sleep(min(5.0, seconds))
        assert operator.process.poll() is None, f"ended with {operator.process.returncode}"
        assert operator.fetch("/healthz")[0] == 200
        assert operator.fetch("/readyz")[0] == 200
    asked = plane.requests() - before
    passed = time.monotonic() - begun
    assert asked.total() <= MOST_REQUESTS_A_SECOND * passed, f"{asked.total() / passed:.2f} requests a second: {asked}"
    assert [line["event"] for line in operator.lines() if line["event"] in ("ready", "stopping", "task failed")] == ["ready"]
    return asked


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.idle", description=__doc__)
    parser.add_argument("--seconds", type=float, default=900.0)
    seconds = parser.parse_args(arguments).seconds
    with tempfile.TemporaryDirectory() as directory, AuditedPlane() as plane:
        plane.kube.delete("FineTuneProfile", "", "default")
        with plane.operator(Path(directory) / "operator.log") as operator:
            asked = watch_idle_operator(plane, operator, seconds)
    print(f"{asked.total() / seconds:.2f} requests a second over {seconds:.0f} s: {dict(asked.most_common())}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

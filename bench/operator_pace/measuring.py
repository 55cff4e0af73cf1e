"""What the operator used and what it asked of the API server."""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.integration.operator_process import OperatorProcess

LONGEST_BATCH_SECONDS = 1.5
"""The API server writes its audit log in batches, and the last of them after a second."""
JOB_LABEL = "name"
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def rss_mb(pid: int) -> float:
    """Resident memory in 10^6 bytes."""
    line = next(one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith("VmRSS"))
    return int(line.split()[1]) * 1024 / 1e6


@dataclass(frozen=True)
class Use:
    """Of the operator between two moments."""

    seconds: float
    cpu_seconds: float
    calls: Counter[str]
    """From the audit log: verb and resource, watches left out."""

    @property
    def num_writes(self) -> int:
        """Requests that change something."""
        return sum(count for call, count in self.calls.items() if call.split()[0] not in ("get", "list"))


class Meter:
    """Reads the operator's CPU time and the audit log from where it was read last."""

    def __init__(self, operator: OperatorProcess, audit_log: Path) -> None:
        self._operator = operator
        self._audit_log = audit_log
        self._offset = 0
        self.restart()

    def restart(self) -> None:
        """Measure from here on."""
        self._calls()
        self._begun, self._cpu = time.monotonic(), cpu_seconds(self._operator.process.pid)

    def read(self) -> Use:
        """Since the start."""
        cpu = cpu_seconds(self._operator.process.pid) - self._cpu
        seconds = time.monotonic() - self._begun
        return Use(seconds, cpu, self._calls())

    def _calls(self) -> Counter[str]:
        calls: Counter[str] = Counter()
        time.sleep(LONGEST_BATCH_SECONDS)
        with self._audit_log.open("rb") as log:
            log.seek(self._offset)
            content = log.read()
        complete = content.rpartition(b"\n")[0]
        self._offset += len(complete) + 1 if complete else 0
        for line in complete.splitlines():
            event = json.loads(line)
            verb, target = event["verb"], event.get("objectRef", {})
            if verb != "watch":
                calls["/".join(filter(None, (f"{verb} {target.get('resource', '-')}", target.get("subresource", ""))))] += 1
        return calls


def histogram(operator: OperatorProcess, name: str) -> dict[float, float]:
    """Cumulative counts of a histogram of the operator by upper bound."""
    text = operator.fetch("/metrics")[1]
    buckets: defaultdict[float, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"{name}_bucket":
                buckets[float(sample.labels["le"])] += sample.value
    return dict(sorted(buckets.items()))


def num_series(operator: OperatorProcess) -> tuple[int, int]:
    """How many series the operator shows: those of single jobs, which have the job's name, and all others."""
    families = text_string_to_metric_families(operator.fetch("/metrics")[1])
    of_jobs = [JOB_LABEL in sample.labels for family in families for sample in family.samples]
    return sum(of_jobs), len(of_jobs) - sum(of_jobs)


def bound_of(buckets: dict[float, float], before: dict[float, float], share: float) -> float:
    """The smallest bucket's bound under which this share of what came between two readings lies."""
    counts = {bound: count - before.get(bound, 0.0) for bound, count in buckets.items()}
    total = max(counts.values(), default=0.0)
    return next((bound for bound, count in counts.items() if count >= share * total), 0.0)


def percentile(values: list[float], share: float) -> float:
    """Of sorted values; nan of none."""
    return values[min(int(share * len(values)), len(values) - 1)] if values else float("nan")


def calibration_ms() -> float:
    """CPU time of a fixed piece of Python work. Neighbours on a shared machine make it longer, as all CPU time."""
    document = {str(number): list(range(20)) for number in range(100)}
    times = []
    for _ in range(5):
        begun = time.process_time()
        for _ in range(100):
            json.dumps(document)
        times.append((time.process_time() - begun) * 1e3)
    return min(times)

"""`python -m tests.chaos [--jobs N] [--seed S]`: prints a table and exits with 1 on any violation.

Half of the jobs run while the operator is killed before and after each write of a job's life, the other half in bad weather.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.oracle import Oracle, orphans
from tests.chaos.player import STORIES, Player, Story, wrong_end
from tests.chaos.proxy import ChaosProxy, Fault
from tests.chaos.weather import KILL_POINTS, Faults, Kills
from tests.integration.kube import Kube
from tests.integration.operator_process import OperatorProcess
from tests.integration.workload import Workload
from tests.support.installed_chart import RELEASE, SYSTEM, InstalledChart, install
from tools.cluster.control_plane import ControlPlane
from tools.cluster.errors import WaitTimeoutError, wait_until


class Supervised:
    """The operator, started again whenever it ends; an end that is not the harness's is a death."""

    def __init__(self, process: OperatorProcess) -> None:
        self.process = process
        self.kills = 0
        self.deaths: list[str] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Supervised:
        self.process.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(30)
        self.process.kill()

    def kill(self) -> None:
        """Kill and start again."""
        with self._lock:
            self._note_death()
            self.process.kill()
            self.kills += 1
            self.process.start()

    def _run(self) -> None:
        while not self._stopping.wait(0.2):
            with self._lock:
                if self._note_death():
                    self.process.start()

    def _note_death(self) -> bool:
        code = self.process.process.poll()
        if code is not None:
            self.deaths.append(f"exit code {code}: {self.process.log.read_text()[-1500:]}")
        return code is not None


@dataclass
class Row:
    """What came of one part."""

    name: str
    jobs: int
    seconds: float = 0.0
    kills: int = 0
    faults: Counter[Fault] = field(default_factory=Counter)
    violations: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Site:
    """The control plane with the chart on it."""

    plane: ControlPlane
    chart: InstalledChart
    directory: Path

    @property
    def kube(self) -> Kube:
        return self.chart.kube

    def workload(self, namespace: str) -> Workload:
        self.kube.create("Namespace", "", {"metadata": {"name": namespace}})
        wait_until(lambda: self.kube.get("ServiceAccount", namespace, "default"), "the default ServiceAccount", 60)
        workload = Workload(self.kube, namespace)
        workload.make_claims()
        return workload


def play(site: Site, name: str, weather: Kills | Faults, stories: dict[str, Story], deadline: float) -> Row:
    """Carry all jobs to their ends in this weather."""
    row, started = Row(name, len(stories)), time.monotonic()
    workload = site.workload(name)
    authority = str(site.plane.authority.certificate)
    with (
        ChaosProxy(site.plane.server, authority, weather) as proxy,
        Oracle(site.kube, name) as oracle,
        Player(workload, stories) as player,
    ):
        process = OperatorProcess(
            *(site.chart.kubeconfig(proxy.address), site.directory / f"{name}.log"),
            *(f"--namespace={name}", "--identity=chaos", f"--lease-namespace={SYSTEM}", f"--lease-name={RELEASE}"),
        )
        with Supervised(process) as operator:
            if isinstance(weather, Kills):
                weather.operator = operator.kill
            for job, story in stories.items():
                workload.apply(job, **story.spec)

            def ends() -> dict[str, str]:
                jobs = {item["metadata"]["name"]: item for item in site.kube.list("FineTuneJob", name)}
                return {job: wrong_end(story, jobs.get(job), oracle.attempts(job, "train")) for job, story in stories.items()}

            def settled() -> bool:
                assert player.error is None, player.error
                return not any(end.startswith("unfinished") for end in ends().values()) and not orphans(site.kube, name)

            try:
                wait_until(settled, f"all jobs of {name} to end", deadline)
            except WaitTimeoutError:
                print(workload.describe()[-8000:], file=sys.stderr)
            found = {f"{job} ({story_name(stories[job])})": end for job, end in ends().items() if end}
            row.violations = {
                "duplicate gangs": oracle.violations(),
                "orphans": orphans(site.kube, name),
                "lost jobs": [f"{job}: {end}" for job, end in found.items() if not end.startswith("wrong")],
                "wrong ends": [
                    f"{job} ({story_name(stories[job])}): {end}" for job, end in found.items() if end.startswith("wrong")
                ],
                "deaths": operator.deaths,
            }
            row.kills, row.faults, row.seconds = operator.kills, weather.counts, time.monotonic() - started
    return row


def story_name(story: Story) -> str:
    return next(name for name, item in STORIES.items() if item is story)


def table(rows: list[Row]) -> str:
    names = list(rows[0].violations)
    lines = [f"{'part':<10}{'jobs':>6}{'seconds':>9}{'kills':>7}{'faults':>8}" + "".join(f"{name:>17}" for name in names)]
    for row in rows:
        numbers = "".join(f"{len(row.violations[name]):>17}" for name in names)
        lines.append(f"{row.name:<10}{row.jobs:>6}{row.seconds:>9.0f}{row.kills:>7}{row.faults.total():>8}{numbers}")
    for row in rows:
        lines += [f"{row.name}: {fault}: {number}" for fault, number in sorted(row.faults.items())]
        lines += [f"{row.name}: {kind}: {text}" for kind, texts in row.violations.items() for text in texts]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--share", type=float, default=0.08, help="of requests that go wrong")
    parser.add_argument("--stalls", type=int, default=3)
    parser.add_argument("--stall-seconds", type=float, default=30.0)
    parser.add_argument("--deadline", type=float, default=0.0, help="seconds for each half; 0: by the number of jobs")
    given = parser.parse_args()
    os.environ["no_proxy"] = "*"  # no proxy reaches loopback
    deadline = given.deadline or 300.0 + 10.0 * given.jobs
    kinds = list(STORIES.values())
    # Stories and kill points have no common divisor in their lengths, so in time every pair meets.
    stories = [(f"chaos-{number}", kinds[number % len(kinds)]) for number in range(given.jobs)]
    half = (given.jobs + 1) // 2
    with tempfile.TemporaryDirectory(prefix="finetune-chaos-") as directory, ControlPlane() as plane:
        site = Site(plane, install(plane, Path(directory)), Path(directory))
        kills = Kills()
        rows = [play(site, "kills", kills, dict(stories[:half]), deadline)]
        faults = Faults(given.seed, given.share, given.stalls, given.stall_seconds)
        rows.append(play(site, "faults", faults, dict(stories[half:]), deadline))
    print(table(rows))
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(f"{sum(item.ru_utime + item.ru_stime for item in used):.0f} s of processor time, the control plane's included")
    for (write, fault), writes in sorted(kills.reached.items()):
        print(f"{fault}: write {write + 1} of a job: {', '.join(sorted(writes))}")
    print(f"{len(kills.reached)} of {min(len(KILL_POINTS), half)} kill points reached (a job that writes less often has fewer)")
    return int(any(texts for row in rows for texts in row.violations.values()))


if __name__ == "__main__":
    sys.exit(main())

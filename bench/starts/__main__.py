"""`python -m bench.starts`: what the roles of a local run cost, and how soon a run continues after a rank was killed.

Runs examples/quickstart.yaml twice in a temporary directory: once from nothing, and once with the verdict of the rehearsal kept,
in which a rank is killed after the first checkpoint. Prints wall and processor seconds of each role (what imports the libraries
counts as the first role's), then three figures next to their limits, and ends with 1 if one is above its own. Processor time is
given in imports: what a process takes that imports torch and the libraries around it as a rank does and nothing else, measured
in between, so that a slow machine fails nothing. About a minute and a half of processor time. `--toy` shows that all of it runs:
once, with a rank killed and without rehearsal and merge, and judges nothing.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from finetune_cli.checks.validate import validate
from finetune_cli.commands.run import local_plan
from finetune_cli.local.claims import claim_directories, claims_of, link_claims
from finetune_cli.local.launch import Interruption
from finetune_cli.local.local_run import LocalRun
from finetune_cli.local.rank_zero import read_progress
from finetune_cli.local.run_directory import freeze, locked, run_directory_of, start_fresh
from finetune_job.api.job import FineTuneJob
from finetune_job.failures import TerminationReport
from finetune_job.names import Role
from finetune_job.progress import Progress
from tools.quickstart import make_claims

MANIFEST = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
LIMITS = {
    "processor time of the run, in imports": 8.0,
    "processor time of preflight with a kept verdict, in imports": 3.0,
    "seconds from the kill of a rank to the next trained step": 6.0,
}
"""Of the first: half of what it was when every role and rank imported the libraries. Of the second: one import for the process
that looks at the model, one for the workers that prepare data without torch, and one for all else.
"""
IMPORT = """
from finetune_trainer.processes.start import end, keep_bitsandbytes_out, preload
keep_bitsandbytes_out()
preload("transformers", "peft", "accelerate", "torch.distributed.fsdp", "torch.distributed.run")
end(0)
"""
IMPORTS = 3
"""Of which the median counts."""
KILLED_AFTER = 6
"""Steps: there is a checkpoint then."""
LOOK_SECONDS = 0.05
DEADLINE_SECONDS = 120.0


@dataclass
class Costs:
    """Listens to a run, and may kill a rank of it."""

    workspace: Path
    is_disturbed: bool
    wall: dict[str, float] = field(default_factory=dict)
    """By role, over all its attempts."""
    processor: dict[str, float] = field(default_factory=dict)
    recovery_seconds: float | None = None
    _before: float = field(default=0.0, init=False)
    _recovery: threading.Thread | None = field(default=None, init=False)

    def started(self, *_: Any, **__: Any) -> None:
        self._before = processor_seconds_below()

    def progressed(self, progress: Progress) -> None:
        if self.is_disturbed and self._recovery is None and progress.step >= KILLED_AFTER:
            ranks = [process for process in psutil.Process().children(recursive=True) if process.name() == "rank-00001"]
            ranks[0].send_signal(signal.SIGKILL)
            self._recovery = threading.Thread(target=self._wait_for_step, args=(progress.attempt, time.monotonic()))
            self._recovery.start()

    def ended(self, report: TerminationReport, seconds: float) -> None:
        self.wall[report.role] = self.wall.get(report.role, 0.0) + seconds
        self.processor[report.role] = self.processor.get(report.role, 0.0) + processor_seconds_below() - self._before

    def said(self, *_: Any, **__: Any) -> None:
        pass

    def restarting(self, *_: Any, **__: Any) -> None:
        pass

    def wait(self) -> None:
        """Until the recovery is measured, if a rank was killed."""
        if self._recovery is not None:
            self._recovery.join()

    def _wait_for_step(self, attempt: int, killed: float) -> None:
        first: int | None = None
        while time.monotonic() < killed + DEADLINE_SECONDS:
            progress = read_progress(self.workspace, attempt)
            if progress is not None and progress.restarts:
                # The first answer of the new ranks may be that of the checkpoint.
                if first is not None and progress.step > first:
                    self.recovery_seconds = time.monotonic() - killed
                    return
                first = progress.step if first is None else first
            time.sleep(LOOK_SECONDS)


def processor_seconds_below() -> float:
    """Of all processes below this one, those that have ended and were waited for included."""
    own = psutil.Process()
    total = own.cpu_times().children_user + own.cpu_times().children_system
    for process in own.children(recursive=True):
        times = process.cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
    return total


def processor_seconds_of_an_import() -> float:
    """Of a process that does nothing else."""
    found = []
    for _ in range(IMPORTS):
        before = processor_seconds_below()
        subprocess.run([sys.executable, "-c", IMPORT], check=True)
        found.append(processor_seconds_below() - before)
    return statistics.median(found)


def manifest_of_a_toy() -> str:
    """As many steps, of little, and nothing around them: so many that a rank can be killed in time."""
    job = yaml.safe_load(MANIFEST.read_text())
    spec: dict[str, Any] = job["spec"]
    del spec["evaluation"], spec["data"]["validation"]
    spec["training"]["globalBatchSize"] = 2
    spec |= {"preflight": {"rehearsal": "Skip"}, "merge": {"enabled": False}}
    return json.dumps(job)


def run(manifest: str, claims: Path, *, is_disturbed: bool) -> Costs:
    """A job from its beginning to its end."""
    job = validate(manifest).verdicts[0].job
    assert isinstance(job, FineTuneJob)
    plan = local_plan(job, own_output=False)
    place = run_directory_of(claims, plan.job)
    uses = claims_of(plan)
    with locked(place) as lock, Interruption() as interruption:
        start_fresh(place)
        record = freeze(place, plan)
        link_claims(uses, claim_directories(uses, claims, {}), place.claims)
        costs = Costs(place.claims / plan.workspace.claim / plan.workspace.path, is_disturbed)
        code = LocalRun(place, plan, record, lock, costs).execute(job.spec.run.max_restarts, interruption)
    costs.wait()
    if code != 0:
        raise SystemExit(f"the run ended with {code}; see {place.root}")
    return costs


def show(title: str, costs: Costs) -> None:
    """A line for each role."""
    print(f"{title}\n  {'role':12}{'wall s':>8}{'cpu s':>8}")
    for role in (*costs.wall, "all"):
        wall, processor = (sum(kind.values()) if role == "all" else kind[role] for kind in (costs.wall, costs.processor))
        print(f"  {role:12}{wall:8.1f}{processor:8.1f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="one short run; nothing is judged")
    is_toy: bool = parser.parse_args().toy
    manifest = manifest_of_a_toy() if is_toy else MANIFEST.read_text()
    with tempfile.TemporaryDirectory(prefix="bench-starts-") as directory:
        claims = Path(directory)
        make_claims(claims)
        first = run(manifest, claims, is_disturbed=is_toy)
        show("from nothing, with a rank killed" if is_toy else "from nothing", first)
        imports = processor_seconds_of_an_import()
        print(f"importing the libraries: {imports:.1f} processor seconds")
        second = first
        if not is_toy:
            second = run(manifest, claims, is_disturbed=True)
            show("again, with a rank killed", second)
    processor = (sum(first.processor.values()), second.processor[Role.PREFLIGHT])
    figures = (*(seconds / imports for seconds in processor), second.recovery_seconds)
    is_within = True
    for (what, limit), figure in zip(LIMITS.items(), figures, strict=True):
        print(f"{what}: {'none' if figure is None else f'{figure:.1f}'} (limit {limit:g})")
        is_within = is_within and figure is not None and (figure <= limit or is_toy)
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main())

"""`python -m bench.validate [--runs N]`: how long a person waits for `finetune validate`.

One manifest from process start, beside what Python and pydantic cost alone, in turns, so that a busy machine slows all of them; and
1,000 manifests in one call, from one file and from a directory. Prints medians with the smallest and the largest, and ends with 1
where a median is above its limit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ROOT / "examples/quickstart.yaml"
FINETUNE = str(Path(sys.executable).with_name("finetune"))
NUM_MANIFESTS = 1000
LIMIT_ONE_MS, LIMIT_MANY_MS = 300.0, 5000.0


def measured(command: Sequence[str]) -> tuple[float, float]:
    """Wall and CPU milliseconds of a process. Raises CalledProcessError."""
    before, start = os.times(), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - start, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return wall * 1e3, cpu * 1e3


def many(directory: Path) -> tuple[Path, Path]:
    """The same job under 1,000 names: as one file of so many documents, and as so many files."""
    text = MANIFEST.read_text()
    jobs = [text.replace("name: quickstart", f"name: job-{number}", 1) for number in range(NUM_MANIFESTS)]
    one, files = directory / "all.yaml", directory / "files"
    one.write_text("---\n".join(jobs))
    files.mkdir()
    for number, job in enumerate(jobs):
        (files / f"{number:04}.yaml").write_text(job)
    return one, files


def main() -> int:
    """Measure and print; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15, help="rounds; each measures everything once")
    runs: int = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as name:
        one, files = many(Path(name))
        commands = {
            "python -c pass": (None, [sys.executable, "-c", "pass"]),
            "python -c 'import pydantic'": (None, [sys.executable, "-c", "from pydantic import BaseModel"]),
            "finetune validate, 1 manifest": (LIMIT_ONE_MS, [FINETUNE, "validate", "-f", str(MANIFEST)]),
            "finetune validate, 1,000 documents": (LIMIT_MANY_MS, [FINETUNE, "validate", "-f", str(one)]),
            "finetune validate, 1,000 files": (LIMIT_MANY_MS, [FINETUNE, "validate", "-f", str(files)]),
        }
        taken: dict[str, list[tuple[float, float]]] = {label: [] for label in commands}
        for _ in range(runs):
            for label, (_, command) in commands.items():
                taken[label].append(measured(command))
    print(f"{'':<36}{'wall ms':>10}{'least':>9}{'most':>9}{'CPU ms':>10}{'limit':>9}   ({runs} runs)")
    too_slow = False
    for label, (limit, _) in commands.items():
        walls, cpus = [wall for wall, _ in taken[label]], [cpu for _, cpu in taken[label]]
        median = statistics.median(walls)
        too_slow |= limit is not None and median > limit
        shown = f"{limit:9.0f}" if limit is not None else f"{'-':>9}"
        print(f"{label:<36}{median:10.0f}{min(walls):9.0f}{max(walls):9.0f}{statistics.median(cpus):10.0f}{shown}")
    return int(too_slow)


if __name__ == "__main__":
    sys.exit(main())

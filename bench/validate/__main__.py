"""`python -m bench.validate [--runs N]`: how long a person waits for `finetune validate`, and for `finetune data`.

One manifest from process start to exit, next to what Python, pydantic and typer cost alone, in turns, so that a busy machine
slows all of them; 1,000 manifests in one call, from one file and from a directory; and the first 1,000 chats of a job whose model
has a vocabulary of 128,000 tokens, which two processors share. Prints the median, least and most of wall
time and of CPU time (user and system), and the machine's load before and after. Ends with 1 if a median of CPU time is above
its limit (but for chats), or one of wall time on a machine that had a core to spare.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.validate.chats import write_job

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ROOT / "examples/quickstart.yaml"
FINETUNE = str(Path(sys.executable).with_name("finetune"))
NUM_MANIFESTS = 1000
# Users have compiled modules.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
LIMIT_ONE_MS, LIMIT_MANY_MS, LIMIT_CHATS_MS = 300.0, 5000.0, 1000.0
VOCABULARY = 128_000
CHATS = "finetune data, 1,000 chats"


def measured(command: Sequence[str]) -> tuple[float, float]:
    """Wall and CPU milliseconds of a process. Raises CalledProcessError."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
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
        chats = write_job(Path(name, "chats"), MANIFEST, VOCABULARY)
        look = [FINETUNE, "data", str(chats), "--claims", str(chats.parent)]
        commands = {
            "python -c pass": (None, [sys.executable, "-c", "pass"]),
            "python -c 'import pydantic'": (None, [sys.executable, "-c", "from pydantic import BaseModel"]),
            "python -c 'import typer'": (None, [sys.executable, "-c", "import typer"]),
            "finetune validate, 1 manifest": (LIMIT_ONE_MS, [FINETUNE, "validate", "-f", str(MANIFEST)]),
            "finetune validate, 1,000 documents": (LIMIT_MANY_MS, [FINETUNE, "validate", "-f", str(one)]),
            "finetune validate, 1,000 files": (LIMIT_MANY_MS, [FINETUNE, "validate", "-f", str(files)]),
            CHATS: (LIMIT_CHATS_MS, look),
        }
        taken: dict[str, list[tuple[float, float]]] = {label: [] for label in commands}
        before = os.getloadavg()[0]
        for _, command in commands.values():
            measured(command)  # modules are compiled, and files are in the cache
        for _ in range(runs):
            for label, (_, command) in commands.items():
                taken[label].append(measured(command))
    loads = (before, os.getloadavg()[0])
    # The process itself adds one to the load.
    has_spare_core = max(loads) <= (os.cpu_count() or 1)
    print(f"{runs} runs, load {loads[0]:.1f} before and {loads[1]:.1f} after, {os.cpu_count()} cores")
    print(f"{'':<36}{'wall ms':>9}{'least':>7}{'most':>7}{'CPU ms':>9}{'least':>7}{'most':>7}{'limit':>7}")
    too_slow = False
    for label, (limit, _) in commands.items():
        walls, cpus = spread([wall for wall, _ in taken[label]]), spread([cpu for _, cpu in taken[label]])
        too_slow |= limit is not None and ((cpus[0] > limit and label != CHATS) or (has_spare_core and walls[0] > limit))
        shown = f"{limit:7.0f}" if limit is not None else f"{'-':>7}"
        figures = "".join(f"{median:9.0f}{least:7.0f}{most:7.0f}" for median, least, most in (walls, cpus))
        print(f"{label:<36}{figures}{shown}")
    return int(too_slow)


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, least and most."""
    return statistics.median(values), min(values), max(values)


if __name__ == "__main__":
    sys.exit(main())

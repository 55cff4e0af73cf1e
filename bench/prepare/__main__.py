"""`python -m bench.prepare --bytes 1GB --runs 3`: our preparation against datasets.map, same tokenizer, masks and processes.

Each run is a fresh process, alternating; its time begins when its libraries are imported. Memory is the largest sum over the
process tree, from start to end, of proportional set sizes (Pss of smaps_rollup: shared pages are counted once, mapped files too),
sampled every quarter of a second; for ours with everything that the preflight role imports. Prints medians and spread, writes
them to bench/results/prepare.json, and fails where counts of tokens or masks differ, or ours took 1 GiB or more.

Memory at a large size: `python -m bench.prepare --bytes 10GB --runs 1 --ours-only --tokenizer words`.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from bench.prepare.corpus import BPE, WORDS, write_records, write_tokenizer
from finetune_trainer.data.cpus import available_cpus

RESULT = Path(__file__).parents[1] / "results" / "prepare.json"
SAMPLE_SECONDS = 0.25
UNITS = {"MB": 10**6, "GB": 10**9}
LIMIT_BYTES = 1 << 30
"""Of all processes together that ours may take."""
COUNTS = ("records", "tokens", "supervised_tokens")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=size, default="1GB", help="of JSON Lines, such as 1GB")
    parser.add_argument("--runs", type=int, default=3, help="runs of each")
    parser.add_argument("--processes", type=int, default=available_cpus(), help="worker processes of each")
    parser.add_argument("--ours-only", action="store_true", help="leave datasets.map out")
    parser.add_argument("--tokenizer", choices=(BPE, WORDS), default=BPE, help="words is fast, for memory at a large size")
    parser.add_argument("--directory", type=Path, help="where to put the data (default: the system's temporary directory)")
    arguments = parser.parse_args()
    contenders = ["ours"] if arguments.ours_only else ["ours", "datasets"]
    with tempfile.TemporaryDirectory(prefix="bench-prepare-", dir=arguments.directory) as name:
        result = measure(Path(name), arguments, contenders)
    if not arguments.ours_only:
        RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for contender in contenders:
        figures = result[contender]
        rates = figures["megabytes_per_second"]
        print(
            f"{contender}: median {statistics.median(rates):.1f} MB/s ({min(rates):.1f} to {max(rates):.1f}), "
            f"peak memory of all processes {max(figures['peak_bytes']) / 2**20:.0f} MiB"
        )
    if "speedup" in result:
        ratio = result["speedup"]
        print(
            f"speedup: median {ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f}) over {arguments.runs} runs of each"
        )
    counts = result["ours"]["counts"]
    print(f"{result['bytes'] / 1e9:.2f} GB, {counts['records']} documents, {counts['tokens']} tokens", end=", ")
    print(f"sequences {100 * counts['filled']:.2f} % full")
    print("different counts:", result["different_counts"] or "none")
    is_small = max(result["ours"]["peak_bytes"]) < LIMIT_BYTES
    print(f"memory of ours: {'below' if is_small else 'NOT BELOW'} {LIMIT_BYTES >> 20} MiB")
    return 1 if result["different_counts"] or not is_small else 0


def size(text: str) -> int:
    """`1GB` -> 1,000,000,000."""
    return int(float(text[:-2]) * UNITS[text[-2:]])


def measure(directory: Path, arguments: argparse.Namespace, contenders: list[str]) -> dict[str, Any]:
    """Runs in alternating order. directory: empty, removed by the caller."""
    runs, processes = arguments.runs, arguments.processes
    records, model = directory / "data" / "records.jsonl", directory / "model"
    records.parent.mkdir()
    write_records(records, arguments.bytes)
    write_tokenizer(model, records, arguments.tokenizer)
    os.sync()
    found: dict[str, dict[str, Any]] = {
        name: {"seconds": [], "megabytes_per_second": [], "peak_bytes": []} for name in contenders
    }
    for run in range(runs):
        for name in contenders if run % 2 == 0 else reversed(contenders):
            peak, counts = run_once(name, records, model, directory / "output", processes)
            seconds = counts.pop("seconds")
            figures = found[name]
            figures["seconds"].append(round(seconds, 2))
            figures["megabytes_per_second"].append(round(records.stat().st_size / 1e6 / seconds, 2))
            figures["peak_bytes"].append(peak)
            figures["counts"] = counts
            print(f"run {run + 1}/{runs}, {name}: {seconds:.1f} s, {peak / 2**20:.0f} MiB", flush=True)
    result: dict[str, Any] = {
        "bytes": records.stat().st_size,
        "runs": runs,
        "processes": processes,
        "tokenizer": arguments.tokenizer,
        "num_cpus": available_cpus(),
        "machine": platform.machine(),
        "versions": {name: version(name) for name in ("datasets", "tokenizers", "transformers")},
        **found,
    }
    different = []
    if "datasets" in found:
        pairs = zip(found["datasets"]["seconds"], found["ours"]["seconds"], strict=True)
        ratios = [theirs / ours for theirs, ours in pairs]
        result["speedup"] = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
        different = [name for name in COUNTS if found["ours"]["counts"][name] != found["datasets"]["counts"][name]]
    return {**result, "different_counts": different}


def run_once(name: str, records: Path, model: Path, output: Path, processes: int) -> tuple[int, dict[str, Any]]:
    """Peak memory in bytes, and what the contender counted. The output is removed."""
    command = [sys.executable, "-m", "bench.prepare.contender", name, str(records), str(model), str(output), str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=said, env=environment)
        peak = 0
        while process.poll() is None:
            peak = max(peak, tree_bytes(process.pid))
            time.sleep(SAMPLE_SECONDS)
        said.seek(0)
        lines = said.read().decode().strip().splitlines()
    shutil.rmtree(output, ignore_errors=True)
    os.sync()  # nobody pays for writing back what another has left
    if process.returncode != 0:
        raise SystemExit(f"{name} failed with status {process.returncode}")
    return peak, json.loads(lines[-1])


def tree_bytes(pid: int) -> int:
    """Proportional set sizes of a process and all below it, together."""
    total = 0
    try:
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in tree:
        try:
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        except OSError:  # it has ended
            continue
        total += sum(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))
    return total


if __name__ == "__main__":
    sys.exit(main())

"""`python -m bench.merge --pairs 7 --parameters 1.1B`: our merge against PEFT's, in interleaved pairs of fresh processes.

Each time runs from the start of the process to the end of the last fsync, imports included. Prints medians and spread,
writes them to bench/results/merge.json, and fails when a tensor differs in a single bit.
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
from pathlib import Path
from typing import Any

from bench.merge.model import RANK, SIZES, write_adapter, write_base
from finetune_trainer.merge.headers import TensorHeader, read_checkpoint

RESULT = Path(__file__).parents[1] / "results" / "merge.json"
COMPARE_BYTES = 8 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7, help="pairs of runs")
    parser.add_argument("--parameters", choices=SIZES, default="1.1B")
    parser.add_argument("--cache", choices=("warm", "cold"), default="warm", help="inputs in the page cache or dropped from it")
    parser.add_argument("--directory", type=Path, help="where to put the models (default: the system's temporary directory)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-merge-", dir=arguments.directory) as name:
        result = measure(Path(name), arguments.pairs, arguments.parameters, arguments.cache)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for contender in ("ours", "peft"):
        figures = result[contender]
        seconds = figures["seconds"]
        print(
            f"{contender}: median {figures['median_seconds']:.1f} s ({min(seconds):.1f} to {max(seconds):.1f}), "
            f"peak memory {figures['median_peak_resident_bytes'] / 1e9:.2f} GB"
        )
    ratio = result["speedup"]
    print(
        f"speedup: median {ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f}) over {arguments.pairs} pairs, "
        f"page cache {arguments.cache} for the inputs"
    )
    print(f"tensors: {result['num_tensors']}, different: {len(result['different_tensors'])}")
    return 1 if result["different_tensors"] else 0


def measure(directory: Path, pairs: int, parameters: str, cache: str) -> dict[str, Any]:
    """Runs the pairs in alternating order. directory: empty, removed by the caller."""
    base, adapter = directory / "base", directory / "adapter"
    base_bytes, adapter_bytes = write_base(base, parameters), write_adapter(adapter, parameters, base)
    os.sync()
    runs: dict[str, list[dict[str, float]]] = {"ours": [], "peft": []}
    different: list[str] = []
    for pair in range(pairs):
        for contender in ("ours", "peft") if pair % 2 == 0 else ("peft", "ours"):
            prepare_cache([*base.iterdir(), *adapter.iterdir()], cache)
            runs[contender].append(run_once(contender, base, adapter, directory / contender))
            print(f"pair {pair + 1}/{pairs}, {contender}: {runs[contender][-1]['seconds']:.1f} s", flush=True)
        if pair == 0:
            different = different_tensors(directory / "ours", directory / "peft")
        for contender in runs:
            shutil.rmtree(directory / contender)
    ratios = [theirs["seconds"] / our["seconds"] for our, theirs in zip(runs["ours"], runs["peft"], strict=True)]
    return {
        "parameters": parameters,
        "base_bytes": base_bytes,
        "adapter_bytes": adapter_bytes,
        "rank": RANK,
        "pairs": pairs,
        "page_cache": cache,
        "num_cpus": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
        "ours": summary(runs["ours"]),
        "peft": summary(runs["peft"]),
        "speedup": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "num_tensors": len(read_checkpoint(base).tensors),
        "different_tensors": different,
    }


def run_once(contender: str, base: Path, adapter: Path, output: Path) -> dict[str, float]:
    """Seconds from process start to durable output, and the peak resident memory in bytes."""
    os.sync()  # nobody pays for writing back what another has left
    command = [sys.executable, "-m", "bench.merge.contender", contender, str(base), str(adapter), str(output)]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    started = time.monotonic()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    figures = json.loads(done.stdout.strip().splitlines()[-1])
    return {"seconds": figures["finished"] - started, "peak_resident_bytes": figures["peak_resident_bytes"]}


def prepare_cache(files: list[Path], cache: str) -> None:
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        if cache == "cold":
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            while os.read(descriptor, COMPARE_BYTES):
                pass
        os.close(descriptor)


def different_tensors(first: Path, second: Path) -> list[str]:
    """Names of tensors that are not in both directories with equal dtype, shape and bytes."""
    left, right = read_checkpoint(first).tensors, read_checkpoint(second).tensors
    return sorted(n for n in left.keys() | right.keys() if n not in left or n not in right or not same(left[n], right[n]))


def same(left: TensorHeader, right: TensorHeader) -> bool:
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    with left.file.open("rb") as first, right.file.open("rb") as second:
        first.seek(left.offset)
        second.seek(right.offset)
        remaining = left.num_bytes
        while remaining:
            count = min(COMPARE_BYTES, remaining)
            if first.read(count) != second.read(count):
                return False
            remaining -= count
    return True


def summary(runs: list[dict[str, float]]) -> dict[str, Any]:
    return {
        "seconds": [round(run["seconds"], 3) for run in runs],
        "median_seconds": statistics.median(run["seconds"] for run in runs),
        "median_peak_resident_bytes": statistics.median(run["peak_resident_bytes"] for run in runs),
    }


def version(distribution: str) -> str:
    from importlib.metadata import version as installed

    return installed(distribution)


if __name__ == "__main__":
    sys.exit(main())

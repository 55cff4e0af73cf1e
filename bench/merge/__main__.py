"""`python -m bench.merge --pairs 7 --parameters 1.1B`: our merge, PEFT's, and a plain copy, one after the other in fresh
processes.

Each time runs from the start of the process to the end of the last fsync, imports included; what is verified afterwards is timed
apart. The ratios are of runs next to each other, because disks swing: of the copies of a round, the fastest one counts, since any
other has waited for the disk to write back what somebody had left. Prints medians, minima and spread, writes them to
bench/results, and fails if a tensor differs from PEFT's in a single bit, or if a median misses a target of its size.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.merge.model import RANK, SIZES, num_bytes, write_adapter, write_base
from bench.verdicts import Verdict, are_reached, at_least, at_most
from finetune_trainer.weights.headers import TensorHeader, read_checkpoint

RESULTS = Path(__file__).parents[1] / "results"
COMPARE_BYTES = 8 << 20
SPARE_BYTES = 2 << 30
"""Of the disk that the benchmark leaves free."""

COPIES = 3
"""In each round."""
VERIFICATIONS = 3
IMPORTS = 3
"""Of torch alone."""
SPEEDUPS = {"1.1B": 4.0, "Qwen2 0.5B": 4.0, "GPT-2 medium": 4.0}
"""Targets: times as fast as PEFT."""
VERIFIED_SECONDS = {"1.1B": 15.0}
"""Targets: of a merge and its verification."""

WITH_THE_MERGE = "with the merge"

Runs = dict[str, list[dict[str, Any]]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7, help="how often each contender runs")
    parser.add_argument("--parameters", choices=SIZES, nargs="+", default=["1.1B"], help="sizes, one after the other")
    parser.add_argument("--cache", choices=("warm", "cold"), default="warm", help="inputs in the page cache or dropped from it")
    parser.add_argument("--without-peft", action="store_true", help="ours and the copy only: PEFT holds the model in memory")
    parser.add_argument("--without-verification", action="store_true")
    parser.add_argument("--directory", type=Path, help="where to put the models (default: the system's temporary directory)")
    arguments = parser.parse_args()
    # Each of them, whatever the others come to.
    return max([compare(parameters, arguments) for parameters in arguments.parameters])


def compare(parameters: str, arguments: argparse.Namespace) -> int:
    """All runs at one size. Prints and records them; 1 if a tensor differs, or a target is missed."""
    models = 2 if arguments.without_peft else 3  # at a time: the base and what is compared
    require_space(arguments.directory or Path(tempfile.gettempdir()), models * num_bytes(parameters) + SPARE_BYTES)
    with tempfile.TemporaryDirectory(prefix="bench-merge-", dir=arguments.directory) as name:
        result = measure(Path(name), parameters, arguments)
    judged = verdicts(result)
    result["verdicts"] = [asdict(verdict) for verdict in judged]
    suffix = "" if parameters == "1.1B" else f"-{parameters.replace(' ', '-')}"
    (RESULTS / f"merge{suffix}.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print_result(result)
    for verdict in judged:
        print(verdict)
    return 1 if result["different_tensors"] or not are_reached(judged) else 0


def verdicts(result: dict[str, Any]) -> list[Verdict]:
    """On what was measured, where there is a target for its size."""
    size, found = result["parameters"], []
    if result["speedup_over_peft"] and size in SPEEDUPS:
        found.append(at_least(f"{size}: the speedup over PEFT", result["speedup_over_peft"]["median"], SPEEDUPS[size]))
    if result["verification"] and size in VERIFIED_SECONDS:
        seconds = result["verification"][WITH_THE_MERGE]["median_seconds"]
        found.append(at_most(f"{size}: seconds of a merge with its verification", seconds, VERIFIED_SECONDS[size]))
    return found


def require_space(directory: Path, wanted: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < wanted:
        sys.exit(f"{directory}: {free / 1e9:.0f} GB are free, this needs {wanted / 1e9:.0f} GB; give another --directory")


def measure(directory: Path, parameters: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs the contenders in alternating order. directory: empty, removed by the caller."""
    base, adapter = directory / "base", directory / "adapter"
    base_bytes, adapter_bytes = write_base(base, parameters), write_adapter(adapter, parameters, base)
    os.sync()
    contenders = ["copy", "ours"] if arguments.without_peft else ["copy", "ours", "peft"]
    runs: Runs = {name: [] for name in contenders}
    different: list[str] | None = None
    verification = None
    for pair in range(arguments.pairs):
        for contender in contenders if pair % 2 == 0 else contenders[::-1]:
            for _ in range(COPIES if contender == "copy" else 1):
                prepare_cache([*base.iterdir(), *adapter.iterdir()], arguments.cache)
                runs[contender].append(run_once(contender, base, adapter, directory / contender))
                print(f"round {pair + 1}/{arguments.pairs}, {contender}: {runs[contender][-1]['seconds']:.2f} s", flush=True)
                if pair or contender == "copy":
                    shutil.rmtree(directory / contender)
        if pair == 0 and not arguments.without_peft:
            different = different_tensors(directory / "ours", directory / "peft")
        if pair == 0 and not arguments.without_verification:
            verification = verify(base, adapter, directory)
        for contender in contenders[1:] if pair == 0 else ():
            shutil.rmtree(directory / contender)
    import_only = run_once("torch", base, adapter, directory / "torch")["peak_resident_bytes"]
    computed = subprocess.run([sys.executable, "-m", "bench.merge.compute"], check=True, stdout=subprocess.PIPE, text=True)
    rounds = [runs["copy"][first : first + COPIES] for first in range(0, len(runs["copy"]), COPIES)]
    copies = [min(found, key=lambda run: float(run["seconds"])) for found in rounds]
    above = statistics.median(run["peak_resident_bytes"] for run in runs["ours"]) - import_only
    return {
        "parameters": parameters,
        "base_bytes": base_bytes,
        "adapter_bytes": adapter_bytes,
        "rank": RANK,
        "rounds": arguments.pairs,
        "page_cache": arguments.cache,
        "num_cpus": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
        **{name: summary(of_contender) for name, of_contender in runs.items()},
        "speedup_over_peft": None if arguments.without_peft else ratios(runs["peft"], runs["ours"]),
        "ratio_to_copy": ratios(runs["ours"], copies),
        "ratio_to_copy_without_import": ratios(runs["ours"], copies, less=import_seconds(base, adapter, directory)),
        "import_of_torch_resident_bytes": import_only,
        "memory_above_import": above,
        "memory_above_import_and_adapter": above - adapter_bytes,
        "compute": json.loads(computed.stdout),
        "verification": verification,
        "num_tensors": len(read_checkpoint(base).tensors),
        "different_tensors": different,
    }


def run_once(contender: str, base: Path, adapter: Path, output: Path) -> dict[str, Any]:
    """Seconds from process start to durable output, and what the contender says of itself."""
    os.sync()  # nobody pays for writing back what another has left
    command = [sys.executable, "-m", "bench.merge.contender", contender, str(base), str(adapter), str(output)]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    started, processor_seconds = time.monotonic(), processor_seconds_of_children()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    processor_seconds = processor_seconds_of_children() - processor_seconds
    return {**figures, "seconds": figures.pop("finished") - started, "processor_seconds": processor_seconds}


def processor_seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def import_seconds(base: Path, adapter: Path, directory: Path) -> float:
    """Of a process that only imports torch."""
    return statistics.median(run_once("torch", base, adapter, directory / "torch")["seconds"] for _ in range(IMPORTS))


def verify(base: Path, adapter: Path, directory: Path) -> dict[str, Any]:
    """The command on our output, which it only verifies, and on none, where it merges first, from process start to report."""
    found: dict[str, Any] = {}
    for name, output in (("alone", directory / "ours"), (WITH_THE_MERGE, directory / "verified")):
        runs = []
        for _ in range(VERIFICATIONS):
            if name != "alone":
                shutil.rmtree(output, ignore_errors=True)
            os.sync()
            runs.append(verify_once(base, adapter, output))
        found[name] = {
            "seconds": [round(seconds, 2) for seconds, _ in runs],
            "median_seconds": round(statistics.median(seconds for seconds, _ in runs), 2),
            "min_seconds": round(min(seconds for seconds, _ in runs), 2),
            "processor_seconds": [round(seconds, 2) for _, seconds in runs],
        }
    shutil.rmtree(directory / "verified")
    return found


def verify_once(base: Path, adapter: Path, output: Path) -> tuple[float, float]:
    """Seconds, and those of processors. Raises CalledProcessError if the model fails."""
    command = [sys.executable, "-m", "finetune_trainer.roles.merge_command", "--base", str(base), "--adapter", str(adapter)]
    started, used = time.monotonic(), processor_seconds_of_children()
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command += ["--output", str(output)]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.monotonic() - started, processor_seconds_of_children() - used


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


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("bytes_read", "bytes_written", "kernel_bytes_read", "kernel_bytes_written")
    return {
        "seconds": [round(run["seconds"], 3) for run in runs],
        "median_seconds": statistics.median(run["seconds"] for run in runs),
        "min_seconds": min(run["seconds"] for run in runs),
        "processor_seconds": [round(run["processor_seconds"], 2) for run in runs],
        "median_peak_resident_bytes": statistics.median(run["peak_resident_bytes"] for run in runs),
        **{name: runs[0][name] for name in names if name in runs[0]},
    }


def ratios(first: list[dict[str, Any]], second: list[dict[str, Any]], less: float = 0.0) -> dict[str, float]:
    """Of the seconds of runs of the same round, `less` taken off the first."""
    found = [(one["seconds"] - less) / other["seconds"] for one, other in zip(first, second, strict=True)]
    return {"median": round(statistics.median(found), 3), "min": round(min(found), 3), "max": round(max(found), 3)}


def print_result(result: dict[str, Any]) -> None:
    for contender in ("copy", "ours", "peft"):
        if contender in result:
            figures = result[contender]
            seconds = figures["seconds"]
            print(
                f"{contender}: median {figures['median_seconds']:.2f} s ({min(seconds):.2f} to {max(seconds):.2f}), "
                f"{min(figures['processor_seconds']):.2f} s of processors, "
                f"peak memory {figures['median_peak_resident_bytes'] / 2**20:.0f} MiB"
            )
    speedup, to_copy = result["speedup_over_peft"], result["ratio_to_copy"]
    if speedup:
        print(f"speedup over PEFT: median {speedup['median']:.2f} ({speedup['min']:.2f} to {speedup['max']:.2f})")
    print(
        f"time of the fastest copy of each round: median {to_copy['median']:.2f} ({to_copy['min']:.2f} to {to_copy['max']:.2f}), "
        "without importing torch "
        f"{result['ratio_to_copy_without_import']['median']:.2f}; {result['rounds']} rounds, inputs {result['page_cache']} "
        "in the page cache"
    )
    print(
        f"memory above importing torch: {result['memory_above_import'] / 2**20:.0f} MiB, the adapter's "
        f"{result['adapter_bytes'] / 2**20:.0f} MiB not taken off"
    )
    ours = result["ours"]
    print(
        f"bytes read {ours['bytes_read']} (base and adapter {result['base_bytes'] + result['adapter_bytes']}), "
        f"written {ours['bytes_written']}; compute alone {result['compute']['median_gigabytes_per_second']} GB/s"
    )
    for name, verified in (result["verification"] or {}).items():
        print(
            f"verification {name}: median {verified['median_seconds']} s, minimum {verified['min_seconds']} s, "
            f"{min(verified['processor_seconds'])} s of processors"
        )
    if result["different_tensors"] is not None:
        print(f"tensors: {result['num_tensors']}, different from PEFT's: {len(result['different_tensors'])}")


if __name__ == "__main__":
    sys.exit(main())

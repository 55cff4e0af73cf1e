"""`python -m bench.trainer --runs 5`: our training run, a bare PyTorch loop and TRL's SFTTrainer, one after the other, in turns.

Each contender is a fresh process (or one per rank) that trains the same adapter on the same documents for one epoch. Tokens are
those of documents, padding not counted; the first steps are left out for all. Ours is the whole run as a pod does it, with its
history, its HTTP server and its batches from prepared data. The bare loop gets our packed batches as tensors in memory. TRL packs
by itself, and its counts of tokens must equal ours. Rates by processor time of the processes are given too: what others do on the
machine changes them little. Fails where they do not, or where the bare loop's loss is not ours within 3 %.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.trainer import workload

RESULTS = Path(__file__).parents[1] / "results"
CONTENDERS = ("ours", "bare", "trl", "ordered")
"""The last, ours with gradients added up in order, runs on demand."""
LAST_STEPS = 3
"""Whose mean loss is the final one."""
LOSS_TOLERANCE = 0.03


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="runs of each contender")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="world sizes")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps of a run, the first 2 not counted")
    parser.add_argument("--micro-batch", type=int, default=2, help="sequences per rank and pass; a step takes four times as many")
    parser.add_argument("--method", choices=("LoRA", "Full"), default="LoRA")
    parser.add_argument("--threads", type=int, help="threads of each rank (default: processors divided by ranks)")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS[:-1]))
    arguments = parser.parse_args()
    if arguments.steps <= workload.WARM_UP_STEPS + LAST_STEPS:
        parser.error(f"--steps must be above {workload.WARM_UP_STEPS + LAST_STEPS}")
    workload.MICRO_BATCH, workload.GLOBAL_BATCH = arguments.micro_batch, 4 * arguments.micro_batch
    results: dict[str, Any] = {
        "machine": platform.machine(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "versions": {name: version(name) for name in ("torch", "transformers", "peft", "trl")},
        "method": arguments.method,
        "micro_batch": workload.MICRO_BATCH,
        "global_batch": workload.GLOBAL_BATCH,
        "sequence_length": workload.LENGTH,
        "worlds": {},
    }
    failed = False
    for world_size in arguments.ranks:
        threads = arguments.threads or max(results["num_cpus"] // world_size, 1)
        world = measure(arguments, world_size, threads)
        results["worlds"][str(world_size)] = world
        failed |= bool(world["problems"])
        show(world, world_size, threads)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"trainer-{arguments.method}-{arguments.micro_batch}.json").write_text(json.dumps(results, indent=2) + "\n")
    return 1 if failed else 0


def measure(arguments: argparse.Namespace, world_size: int, threads: int) -> dict[str, Any]:
    """All runs with one world size, contenders in turns."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.contenders}
    for number in range(arguments.runs):
        turn = number % len(arguments.contenders)
        for name in (*arguments.contenders[turn:], *arguments.contenders[:turn]):
            runs[name].append(run_once(name, arguments.method, arguments.steps, world_size, threads))
            rate = runs[name][-1]["tokens_per_second"]
            print(f"{world_size} ranks, run {number + 1}/{arguments.runs}, {name}: {rate:.0f} tokens/s", flush=True)
    return {"threads": threads, "contenders": {name: summary(found) for name, found in runs.items()}, "problems": problems(runs)}


def run_once(name: str, method: str, steps: int, world_size: int, threads: int) -> dict[str, Any]:
    """One contender from nothing: its figures."""
    with tempfile.TemporaryDirectory(prefix="bench-trainer-") as text:
        directory = Path(text)
        workload.write(directory, method, steps, world_size)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            (directory / "port").write_text(str(listener.getsockname()[1]))
        environment = {
            **os.environ,
            workload.MICRO_BATCH_VARIABLE: str(workload.MICRO_BATCH),
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [sys.executable, "-m", "bench.trainer.contender", name, text, method]
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(world_size)],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=(directory / f"errors-{rank}").open("wb"),
            )
            for rank in range(world_size)
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            errors = "\n".join((directory / f"errors-{rank}").read_text(errors="replace")[-3000:] for rank in range(world_size))
            raise RuntimeError(f"{name} ended with {codes}:\n{errors}")
        figures = [json.loads((directory / f"figures-{rank}.json").read_text()) for rank in range(world_size)]
        counts = json.loads((directory / "counts.json").read_text())
        shutil.rmtree(directory, ignore_errors=True)
    return evaluated(name, figures, counts)


def evaluated(name: str, figures: list[dict[str, Any]], counts: list[list[int]]) -> dict[str, Any]:
    """Rate, loss and counts of one run from its ranks' figures. `counts`: tokens and supervised tokens of each step."""
    first, total = figures[0], sum(tokens for tokens, _ in counts)
    num_steps = len(first["starts"]) - 1
    seconds, busy = (first[clock][-1] - first[clock][workload.WARM_UP_STEPS] for clock in ("starts", "busy"))
    # TRL packs in its own order: its steady steps hold as many tokens as theirs are of all its steps.
    share = (num_steps - workload.WARM_UP_STEPS) / num_steps
    tokens = sum(count for count, _ in counts[workload.WARM_UP_STEPS :]) if name != "trl" else total * share
    found = {
        "tokens_per_second": tokens / seconds,
        "tokens_per_cpu_second": tokens / (busy * len(figures)),
        "final_loss": statistics.fmean(first["losses"][-LAST_STEPS:]),
        "peak_resident_bytes": max(rank["peak_resident_bytes"] for rank in figures),
        "steps": num_steps,
        "expected": {"tokens": total, "supervised_tokens": sum(supervised for _, supervised in counts)},
        "supervised_tokens": first["supervised_tokens"],
        "stated": {key: first[key] for key in ("attention", "packing", "distribution") if key in first},
    }
    if name == "trl":
        found["supervised_tokens"] = sum(rank["supervised_tokens"] for rank in figures)
        found["tokens"] = sum(rank["tokens"] for rank in figures)
    return found


def problems(runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    """What makes the comparison void."""
    found = []
    for name, each in runs.items():
        for run in each:
            found += [
                f"{name} trained {run[kind]} {kind}, expected {run['expected'][kind]}"
                for kind in ("tokens", "supervised_tokens")
                if kind in run and run[kind] != run["expected"][kind]
            ]
    if "ours" in runs and "bare" in runs:
        ours, bare = (statistics.median(run["final_loss"] for run in runs[name]) for name in ("ours", "bare"))
        if abs(ours - bare) > LOSS_TOLERANCE * bare:
            found.append(f"final loss {ours:.4f} is not the bare loop's {bare:.4f} within {LOSS_TOLERANCE:.0%}")
    return sorted(set(found))


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What the runs come to."""
    rates = [run["tokens_per_second"] for run in runs]
    return {
        "tokens_per_second": [round(rate, 1) for rate in rates],
        "median_tokens_per_second": statistics.median(rates),
        "tokens_per_cpu_second": [round(run["tokens_per_cpu_second"], 1) for run in runs],
        "final_loss": statistics.median(run["final_loss"] for run in runs),
        "median_peak_resident_bytes": statistics.median(run["peak_resident_bytes"] for run in runs),
        "supervised_tokens": runs[0]["supervised_tokens"],
        "stated": runs[0].get("stated"),
    }


def show(world: dict[str, Any], world_size: int, threads: int) -> None:
    print(f"\n{world_size} rank(s), {threads} thread(s) each")
    contenders = world["contenders"]
    for name, found in contenders.items():
        rates = found["tokens_per_second"]
        print(
            f"  {name}: median {found['median_tokens_per_second']:.0f} tokens/s ({min(rates):.0f} to {max(rates):.0f}), "
            f"{statistics.median(found['tokens_per_cpu_second']):.0f} per processor second, "
            f"final loss {found['final_loss']:.4f}, peak memory {found['median_peak_resident_bytes'] / 1e9:.2f} GB per rank, "
            f"{found['supervised_tokens']} supervised tokens"
        )
        if found["stated"]:
            print(f"    {', '.join(f'{key}: {value}' for key, value in found['stated'].items())}")
    for other in [name for name in contenders if name != "ours" and "ours" in contenders]:
        for kind in ("tokens_per_second", "tokens_per_cpu_second"):
            pairs = zip(contenders["ours"][kind], contenders[other][kind], strict=True)
            ratios = [mine / theirs for mine, theirs in pairs]
            print(f"  ours / {other}, {kind}: median {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    for problem in world["problems"]:
        print(f"  PROBLEM: {problem}")


if __name__ == "__main__":
    sys.exit(main())

"""`python -m bench.trainer --runs 5`: our training run, a bare PyTorch loop and TRL's SFTTrainer, one after the other, in turns.

Each contender is a fresh process (or one per rank) that trains the same adapter on the same documents for one epoch. Tokens are
those of documents, padding not counted; the first steps are left out for all. Ours is the whole run as a pod does it, with its
history, its HTTP server and its batches from prepared data. The bare loop gets our packed batches as tensors in memory. TRL packs
by itself, and its counts of tokens must equal ours. Rates by processor time of the processes are given too: what others do on the
machine changes them little. Fails if a count differs, if the bare loop's loss is not ours within 3 %, or if the median speed
misses a target: ahead of TRL, and within 3 % of the bare loop. Only a run of all three contenders at 1 and 2 ranks, with the
default's steps and threads, replaces the record in bench/results; any other is kept beside it as `-partial`.
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
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.trainer import workload
from bench.verdicts import Verdict, above, are_reached, at_least

RESULTS = Path(__file__).parents[1] / "results"
COMPARED = ("ours", "bare", "trl")
CONTENDERS = (*COMPARED, "ordered")
"""The last, ours with gradients added up in order, runs on demand."""
RANKS, STEPS = (1, 2), 10
"""Of a whole record."""
LAST_STEPS = 3
"""Whose mean loss is the final one."""
LOSS_TOLERANCE = 0.03
ABOVE_TRL, OF_BARE = 1.0, 0.97
"""Targets: times the others' tokens per second."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="runs of each contender")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS), help="world sizes")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of a run, the first 2 not counted")
    parser.add_argument(
        "--micro-batch", type=int, nargs="+", default=[2], help="sequences per rank and pass; a step takes four times as many"
    )
    parser.add_argument("--method", choices=("LoRA", "Full"), default="LoRA")
    parser.add_argument("--threads", type=int, help="threads of each rank (default: processors divided by ranks)")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(COMPARED))
    parser.add_argument("--toy", action="store_true", help="a tiny model: shows that all runs; speed is not judged")
    arguments = parser.parse_args()
    if arguments.steps <= workload.WARM_UP_STEPS + LAST_STEPS:
        parser.error(f"--steps must be above {workload.WARM_UP_STEPS + LAST_STEPS}")
    if arguments.toy:
        return compare(arguments, workload.TOY)
    # Each of them, whatever the others come to.
    return max([compare(arguments, workload.Size(workload.MODEL, workload.LENGTH, each)) for each in arguments.micro_batch])


def compare(arguments: argparse.Namespace, size: workload.Size) -> int:
    """All runs at one size. Prints and records them; 1 if the comparison is void, or a target is missed."""
    results: dict[str, Any] = {
        "machine": platform.machine(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "versions": {name: version(name) for name in ("torch", "transformers", "peft", "trl")},
        "method": arguments.method,
        "micro_batch": size.micro_batch,
        "global_batch": size.global_batch,
        "sequence_length": size.length,
        "worlds": {},
    }
    failed = False
    for world_size in arguments.ranks:
        threads = arguments.threads or max(results["num_cpus"] // world_size, 1)
        world = measure(arguments, size, world_size, threads)
        judged = verdicts(world["contenders"])
        results["worlds"][str(world_size)] = world | {"verdicts": [asdict(verdict) for verdict in judged]}
        failed |= bool(world["problems"]) or not (are_reached(judged) or arguments.toy)
        show(world, judged, world_size, threads)
    (RESULTS / record_name(arguments, size)).write_text(json.dumps(results, indent=2) + "\n")
    return 1 if failed else 0


def record_name(arguments: argparse.Namespace, size: workload.Size) -> str:
    """Of the file: a run of less, or of something else, must not replace the record of all."""
    if arguments.toy:
        return "trainer-toy.json"
    is_whole = (
        set(COMPARED) <= set(arguments.contenders)
        and set(RANKS) <= set(arguments.ranks)
        and (arguments.steps, arguments.threads) == (STEPS, None)
    )
    return f"trainer-{arguments.method}-{size.micro_batch}{'' if is_whole else '-partial'}.json"


def measure(arguments: argparse.Namespace, size: workload.Size, world_size: int, threads: int) -> dict[str, Any]:
    """All runs with one world size, contenders in turns."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.contenders}
    for number in range(arguments.runs):
        turn = number % len(arguments.contenders)
        for name in (*arguments.contenders[turn:], *arguments.contenders[:turn]):
            runs[name].append(run_once(name, arguments, size, world_size, threads))
            rate = runs[name][-1]["tokens_per_second"]
            print(f"{world_size} ranks, run {number + 1}/{arguments.runs}, {name}: {rate:.0f} tokens/s", flush=True)
    return {"threads": threads, "contenders": {name: summary(found) for name, found in runs.items()}, "problems": problems(runs)}


def run_once(name: str, arguments: argparse.Namespace, size: workload.Size, world_size: int, threads: int) -> dict[str, Any]:
    """One contender from nothing: its figures."""
    with tempfile.TemporaryDirectory(prefix="bench-trainer-") as text:
        directory = Path(text)
        workload.write(directory, arguments.method, arguments.steps, world_size, size)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            (directory / "port").write_text(str(listener.getsockname()[1]))
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-m", "bench.trainer.contender", name, text, arguments.method]
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


def ratios(contenders: dict[str, Any], other: str, kind: str) -> list[float]:
    """Ours to another's, of runs next to each other."""
    return [mine / theirs for mine, theirs in zip(contenders["ours"][kind], contenders[other][kind], strict=True)]


def verdicts(contenders: dict[str, Any]) -> list[Verdict]:
    """On speed, of those that ran."""
    judges = {"trl": (above, ABOVE_TRL, "TRL's"), "bare": (at_least, OF_BARE, "the bare loop's")}
    return [
        judge(f"our speed relative to {whose}", statistics.median(ratios(contenders, other, "tokens_per_second")), bound)
        for other, (judge, bound, whose) in judges.items()
        if other in contenders and "ours" in contenders
    ]


def show(world: dict[str, Any], judged: list[Verdict], world_size: int, threads: int) -> None:
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
            found = ratios(contenders, other, kind)
            print(f"  ours / {other}, {kind}: median {statistics.median(found):.3f} ({min(found):.3f} to {max(found):.3f})")
    for verdict in judged:
        print(f"  {verdict}")
    for problem in world["problems"]:
        print(f"  PROBLEM: {problem}")


if __name__ == "__main__":
    sys.exit(main())

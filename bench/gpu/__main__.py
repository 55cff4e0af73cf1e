"""`python -m bench.gpu`: an 8B-class Llama, LoRA r=16 on every linear layer, packed sequences of 4096 tokens or more, bfloat16.

A rank of a job as a pod runs it and TRL's SFTTrainer do the same work in processes of their own, one for each GPU that --ranks
asks for. The model takes 16 GB in the directory for temporary files, or in --models, where the next call finds it. Without a GPU
it says so and does nothing. `--size tiny` runs the same code on a small model on the CPU, to show that it works; its figures mean
nothing else. What the planner calculates stands next to what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model

from bench.gpu.calculated import Calculated, calculated
from bench.gpu.contender import CONTENDERS, SIZES, adapter, documents, make_model, recomputes
from finetune_memory.devices import device_of
from finetune_trainer.observe.flops import model_cost

RESULTS = Path(__file__).parents[1] / "results" / "gpu"
TINY = "tiny"
"""What the names of sizes for a CPU begin with."""
RUN_SECONDS = 1800.0
TARGET_TOKENS_PER_SECOND, STRETCH_TOKENS_PER_SECOND = 14_000, 15_000


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="runs of each contender, in turns")
    parser.add_argument("--steps", type=int, help="optimizer steps of a run; unset: as many as the size has")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs, or processes on the CPU")
    parser.add_argument("--size", choices=list(SIZES), default="8B", help="the model, and the length of its rows; tiny: on a CPU")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=["ours", "trl"])
    parser.add_argument("--run-seconds", type=float, default=RUN_SECONDS, help="that a run may take before it is ended")
    parser.add_argument("--models", type=Path, help="where the model stays for the next call")
    parser.add_argument("--record", help="name of the file with the figures; unset: throughput-SIZE")
    arguments = parser.parse_args(argv)
    size, ranks = arguments.size, arguments.ranks
    steps, warm_up = arguments.steps or SIZES[size]["steps"], SIZES[size]["warm_up"]
    if steps <= warm_up or arguments.runs < 1:
        parser.error(f"--steps must be above {warm_up}, which are not counted, and --runs at least 1")
    is_tiny = size.startswith(TINY)
    if not is_tiny and torch.cuda.device_count() < arguments.ranks:
        print(f"not measured: {torch.cuda.device_count() or 'no'} GPU of {arguments.ranks}")
        return 0
    contenders = arguments.contenders
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    failed = set()
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as prepared:
        if arguments.models is not None:
            arguments.models.mkdir(parents=True, exist_ok=True)
            Path(prepared, "models").symlink_to(arguments.models.resolve())
        if any(ended([contender("prepare", Path(prepared), size, steps, ranks=ranks)], arguments.run_seconds)):
            return 1
        for number in range(arguments.runs):
            for name in contenders if number % 2 == 0 else reversed(contenders):
                try:
                    runs[name].append(run_once(name, Path(prepared), size, steps, ranks, seconds=arguments.run_seconds))
                except RuntimeError as error:
                    # The others have figures all the same.
                    failed.add(name)
                    print(f"run {number + 1}/{arguments.runs}: {error}", flush=True)
                    continue
                rate = runs[name][-1]["tokens_per_second"]
                print(f"run {number + 1}/{arguments.runs}, {name}: {rate:.0f} tokens/s", flush=True)
                if not is_tiny:
                    keep(arguments.record or f"throughput-{size}", size, ranks, runs)
    flops = flops_per_token(size, steps, ranks)
    for name, found in runs.items():
        if found:
            print(line(name, found, flops, ranks, calculated(name, size, ranks, found[0]["device"])))
    if size == "8B":
        print(f"target {TARGET_TOKENS_PER_SECOND} tokens/s on one H100 or H200, stretch {STRETCH_TOKENS_PER_SECOND}")
    return int(bool(failed))


def keep(record: str, size: str, ranks: int, runs: dict[str, list[dict[str, Any]]]) -> None:
    """The figures so far, after each run: a machine with a GPU may be taken away before the last. What is calculated stands next
    to them. speed.json in the same folder has figures of kernels, too, and was written by hand.
    """
    how = {"size": size, "ranks": ranks, "recomputes": recomputes(size), "torch": torch.__version__}
    expected = {
        name: asdict(found) for name, of in runs.items() if of and (found := calculated(name, size, ranks, of[0]["device"]))
    }
    (RESULTS / f"{record}.json").write_text(json.dumps({**how, "calculated": expected, "runs": runs}, indent=2) + "\n")


def contender(name: str, directory: Path, size: str, steps: int, *, rank: int = 0, ranks: int) -> subprocess.Popen[bytes]:
    """The process of one rank."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if size.startswith(TINY):
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "bench.gpu.contender", name, str(directory), size, str(steps), str(rank), str(ranks)]
    return subprocess.Popen(command, env=environment)


def ended(processes: list[subprocess.Popen[bytes]], seconds: float) -> list[int]:
    """The exit codes of all, of which those that run longer than this are killed."""
    deadline = time.monotonic() + seconds
    try:
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(deadline - time.monotonic(), 0))
    finally:
        for process in processes:
            process.kill()
    return [process.wait() for process in processes]


def run_once(name: str, prepared: Path, size: str, steps: int, ranks: int, *, seconds: float) -> dict[str, Any]:
    """Figures of one run on a workspace of its own. prepared: what it begins with. Raises RuntimeError if it fails, or takes
    longer than `seconds`.
    """
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as place, socket.socket() as listener:
        directory = Path(place)
        (directory / "models").symlink_to(prepared / "models")
        shutil.copytree(prepared / "workspace", directory / "workspace")
        listener.bind(("127.0.0.1", 0))
        (directory / "port").write_text(str(listener.getsockname()[1]))
        listener.close()
        processes = [contender(name, directory, size, steps, rank=rank, ranks=ranks) for rank in range(ranks)]
        codes = ended(processes, seconds)
        if any(codes):
            raise RuntimeError(f"{name} ended with {codes}")
        found = [json.loads((directory / f"figures-{rank}.json").read_text()) for rank in range(ranks)]
    settings, starts = SIZES[size], found[0]["starts"]
    warm_up = settings["warm_up"]
    tokens = (steps - warm_up) * settings["micro_batch"] * settings["accumulation"] * ranks * settings["length"]
    peaks = [rank["peak_memory_bytes"] for rank in found]
    return {
        "tokens_per_second": tokens / (starts[-1] - starts[warm_up]),
        "loss": found[0]["loss"],
        "peak_memory_bytes": None if None in peaks else max(peaks),
        "device": found[0]["device"],
    }


def flops_per_token(size: str, steps: int, ranks: int) -> float:
    """Of LoRA training on these documents, counted as the trainer counts it for its MFU."""
    model = get_peft_model(make_model(size, torch.device("meta")), adapter())
    lengths = [len(document) for sequence in documents(size, steps, ranks) for document in sequence]
    cost = model_cost(model, model.config)
    return cost.step_flops(sum(lengths), sum(length * length for length in lengths)) / sum(lengths)


def line(name: str, found: list[dict[str, Any]], flops: float, ranks: int, expected: Calculated | None) -> str:
    """One line for a reader, with the errors of what is calculated."""
    rates = [run["tokens_per_second"] for run in found]
    rate, device = statistics.median(rates), found[0]["device"]
    known = device_of(device)
    utilisation = f"{rate * flops / (known.flops * ranks):.1%}" if known else "unknown"
    memory = found[0]["peak_memory_bytes"]
    shown = f"{memory / 1e9:.1f} GB" if memory is not None else "not measured"
    pace, planned = "", ""
    if expected is not None:
        pace = f", calculated {expected.tokens_per_second:.0f} ({expected.tokens_per_second / rate - 1:+.1%})"
        error = f" ({expected.peak_memory_bytes / memory - 1:+.1%})" if memory is not None else ""
        planned = f", planned {expected.peak_memory_bytes / 1e9:.1f} GB{error}"
    return (
        f"{name} on {ranks} x {device}: {rate:.0f} tokens/s ({min(rates):.0f} to {max(rates):.0f}){pace}, MFU {utilisation}, "
        f"peak memory {shown}{planned}, loss {found[-1]['loss']:.4f}"
    )


if __name__ == "__main__":
    sys.exit(main())

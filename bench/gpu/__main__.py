"""`python -m bench.gpu`: an 8B-class Llama, LoRA r=16 on every linear layer, packed sequences of 4096 tokens, bfloat16, one GPU.

Ours and TRL's SFTTrainer do the same work in processes of their own. Without a GPU it says so and does nothing; `--tiny` runs the
same code on a small model on the CPU, to show that it works, and its figures mean nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model

from bench.gpu.contender import WARM_UP_STEPS, adapter, documents, make_model
from finetune_trainer.observe.flops import model_cost, peak_flops

RESULT = Path(__file__).parents[1] / "results" / "gpu.json"
CONTENDERS = ("ours", "trl")
TARGET_TOKENS_PER_SECOND, STRETCH_TOKENS_PER_SECOND = 12_500, 15_000


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="runs of each contender, in turns")
    parser.add_argument("--steps", type=int, default=10, help=f"optimizer steps of a run, the first {WARM_UP_STEPS} not counted")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    arguments = parser.parse_args(argv)
    if arguments.steps <= WARM_UP_STEPS or arguments.runs < 1:
        parser.error(f"--steps must be above {WARM_UP_STEPS} and --runs at least 1")
    if not arguments.tiny and not torch.cuda.is_available():
        print("not measured: no GPU")
        return 0
    size = "tiny" if arguments.tiny else "8B"
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    for number in range(arguments.runs):
        for name in CONTENDERS if number % 2 == 0 else reversed(CONTENDERS):
            runs[name].append(run_once(name, size, arguments.steps))
    for name, found in runs.items():
        print(line(name, found, flops_per_token(size, arguments.steps)))
    if not arguments.tiny:
        print(f"target {TARGET_TOKENS_PER_SECOND} tokens/s on one H100 or H200, stretch {STRETCH_TOKENS_PER_SECOND}")
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps({"size": size, "runs": runs}, indent=2) + "\n")
    return 0


def run_once(name: str, size: str, steps: int) -> dict[str, Any]:
    """Figures of one process."""
    command = [sys.executable, "-m", "bench.gpu.contender", name, size, str(steps)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def flops_per_token(size: str, steps: int) -> float:
    """Of LoRA training on these documents, counted as the trainer counts it for its MFU."""
    model = get_peft_model(make_model(size, torch.device("meta")), adapter())
    lengths = [len(document) for sequence in documents(size, steps) for document in sequence]
    cost = model_cost(model, model.config)
    return cost.step_flops(sum(lengths), sum(length * length for length in lengths)) / sum(lengths)


def line(name: str, found: list[dict[str, Any]], flops: float) -> str:
    """One line for a reader."""
    rates = [run["tokens_per_second"] for run in found]
    rate, device = statistics.median(rates), found[0]["device"]
    peak = peak_flops(device)
    utilisation = f"{rate * flops / peak:.1%}" if peak else "unknown"
    memory = found[0]["peak_memory_bytes"]
    shown = f"{memory / 1e9:.1f} GB" if memory is not None else "not measured"
    return (
        f"{name} on {device}: {rate:.0f} tokens/s ({min(rates):.0f} to {max(rates):.0f}), MFU {utilisation}, "
        f"peak memory {shown}, loss {found[-1]['loss']:.4f}"
    )


if __name__ == "__main__":
    sys.exit(main())

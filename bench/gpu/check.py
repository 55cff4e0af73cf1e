"""`python -m bench.gpu.check [TIER...]`: what only a GPU can show of the trainer, in tiers that stand alone.

A tier that fails stops no other. With a GPU each writes its figures to bench/results/gpu/TIER.json. Without one the same code
runs at toy size on the CPU, so that it starts at the first try where there is one, and each tier says what was not shown.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch

from bench.gpu.tiers import TIERS, Scale, Tier

RESULTS = Path(__file__).parents[1] / "results" / "gpu"


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0 if every tier passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tiers", nargs="*", choices=[[], *TIERS], help="all, unless some are named", metavar="TIER")
    parser.add_argument("--toy", action="store_true", help="on the CPU at toy size, also if there is a GPU")
    arguments = parser.parse_args(argv)
    if arguments.toy:
        # Read by this process and by all that it starts.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    scale = Scale.of_this_machine()
    print(f"{scale.name}, torch {torch.__version__}", flush=True)
    failed = [name for name in arguments.tiers or TIERS if not run(name, TIERS[name], scale)]
    print(f"failed: {', '.join(failed)}" if failed else "all tiers passed")
    return int(bool(failed))


def run(name: str, tier: Tier, scale: Scale) -> bool:
    """Whether the tier passed."""
    print(f"== {name}", flush=True)
    began, problem = time.monotonic(), ""
    rows: list[dict[str, object]] = []
    try:
        problem = tier.run(scale, rows)
    except Exception as error:  # noqa: BLE001 - whatever a library or a device raises, the next tier is tried
        traceback.print_exc()
        problem = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began
    for row in rows:
        print("   " + ", ".join(f"{key} {_shown(value)}" for key, value in row.items()))
    print(f"{name}: {f'FAILED: {problem}' if problem else 'passed'} ({seconds:.1f} s)", flush=True)
    if scale.is_toy:
        print(f"{name}: not shown, because there is no GPU: {tier.shows}", flush=True)
    else:
        RESULTS.mkdir(parents=True, exist_ok=True)
        found = {"device": scale.name, "torch": torch.__version__, "seconds": seconds, "problem": problem, "rows": rows}
        (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
        torch.cuda.empty_cache()
    return not problem


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())

"""The process in which `python -m bench.gpu.check` runs tiers, one after another."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from pathlib import Path

import torch

from bench.gpu.check import reporter
from bench.gpu.scale import Scale, Tier
from bench.gpu.tiers import TIERS

RESULTS = Path(__file__).parents[1] / "results" / "gpu"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.gpu.check")
    parser.add_argument("descriptor", type=int, help="of the pipe to which is reported")
    parser.add_argument("tiers", nargs="*", choices=[[], *TIERS], metavar="TIER")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args(argv)
    scale = Scale.of_this_machine(is_quick=arguments.quick)
    names = arguments.tiers or list(TIERS)
    print(f"{scale.name}, torch {torch.__version__}", flush=True)
    with reporter(arguments.descriptor) as reports:
        plan = {"on_device": not scale.is_toy, "limits": {name: scale.limit(TIERS[name]) for name in names}}
        reports.send_bytes(json.dumps(plan).encode())
        for name in names:
            problem = run(name, TIERS[name], scale)
            reports.send_bytes(json.dumps({"tier": name, "problem": problem}).encode())
    return 0


def run(name: str, tier: Tier, scale: Scale) -> str:
    """What is wrong; empty: the tier passed."""
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
        found = {"device": scale.name, "torch": torch.__version__, "seconds": seconds, "problem": problem, "rows": rows}
        (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
        torch.cuda.empty_cache()
    return problem


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())

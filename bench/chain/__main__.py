"""Seconds from `kubectl apply` to the first optimizer step and to `Succeeded` on a real node, with the parts.

`python -m bench.chain --runs N` (`make bench-chain RUNS=N`). The physical limit in the same run is the same plan as local
processes (`finetune run`): the ratio is what Kubernetes, images and the operator add. Run to run the job's name changes, nothing
else.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from finetune_job.names import Role
from tools.stack import ROOT, Stack, condition_of

EXAMPLE = "examples/quickstart.yaml"
ROLES = (Role.PREFLIGHT, Role.TRAIN, Role.MERGE)
"""Of the example, whose inputs and results lie on claims."""
"""One pod with two ranks: what a local run can do too."""
RESULT = ROOT / "bench/results/chain.json"


def seconds_between(first: str, last: str) -> float:
    """Between two RFC 3339 times."""
    return (datetime.fromisoformat(last) - datetime.fromisoformat(first)).total_seconds()


def on_the_node(
    stack: Stack,
    name: str,
    example: str = EXAMPLE,
    *,
    when_applied: Callable[[], None] = lambda: None,
    when_training: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """One job on the node, under this name: parts in seconds.

    What is called when the job is applied, and when its first step is done, counts. Raises RuntimeError if the job fails.
    """
    start = time.monotonic()
    stack.apply_example(example, name=name)
    when_applied()
    stack.wait_for_step(name, 1)
    first_step = time.monotonic() - start
    when_training()
    job = stack.wait_for_condition(name, "Finished", "Stalled")
    total = time.monotonic() - start
    if condition_of(job, "Succeeded").get("status") != "True":
        raise RuntimeError(f"{name} did not succeed: {json.dumps(job['status'], indent=2)}")
    parts = {"first_step": first_step, "succeeded": total}
    for role in ROLES:
        (batch_job,) = stack.batch_jobs(name, role)
        parts[role.value] = seconds_between(batch_job["status"]["startTime"], batch_job["status"]["completionTime"])
    parts["between"] = total - sum(parts[role.value] for role in ROLES)
    return parts


def on_this_machine(claims: Path, number: int) -> float:
    """The same plan as local processes; seconds from start to the end of the summary."""
    document: dict[str, Any] = yaml.safe_load((ROOT / EXAMPLE).read_text())
    document["metadata"]["name"] = f"bench-local-{number}"
    document["spec"]["output"]["destination"] = f"pvc://models-out/bench-local-{number}"
    manifest = claims.parent / f"local-{number}.yaml"
    manifest.write_text(json.dumps(document))
    start = time.monotonic()
    subprocess.run(
        [Path(sys.executable).parent / "finetune", "run", manifest, "--claims", claims, "--fresh"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.monotonic() - start


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": round(statistics.median(values), 2), "min": round(min(values), 2), "max": round(max(values), 2)}


def main() -> None:
    """Run, print and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    cluster: list[dict[str, float]] = []
    local: list[float] = []
    with Stack() as stack, tempfile.TemporaryDirectory() as scratch:
        claims = Path(scratch) / "claims"
        subprocess.run([sys.executable, "-m", "tools.quickstart", claims], cwd=ROOT, check=True)
        for number in range(runs):
            cluster.append(on_the_node(stack, f"bench-{number}"))
            local.append(on_this_machine(claims, number))
            print(f"run {number + 1}: " + ", ".join(f"{key} {value:.1f} s" for key, value in cluster[-1].items())
                  + f"; local {local[-1]:.1f} s", flush=True)  # fmt: skip
    ratios = [one["succeeded"] / alone for one, alone in zip(cluster, local, strict=True)]
    result = {
        "example": EXAMPLE,
        "runs": runs,
        "machine": platform.processor() or platform.machine(),
        "seconds": {part: spread([one[part] for one in cluster]) for part in cluster[0]},
        "local_seconds": spread(local),
        "ratio_to_local": spread(ratios),
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

"""`python -m bench.memory.packed_load`: host memory of each rank that loads a 4-bit base by shards.

Makes a Llama of about 2 GB in bfloat16, builds it for QLoRA on gloo ranks of the CPU by the trainer's own `build`, and compares
what each rank's resident memory grows by with its shard, one layer as it is stored, and 300 MB. Before that each rank has built a
tiny model, so that what libraries allocate once is not counted. `--whole` lets every rank load and pack all of the base, for
comparison. Prints a table, and fails where a rank takes more.

    python -m bench.memory.packed_load --ranks 2,4
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from finetune_job.plan.element_types import resolve_elements
from finetune_memory.describe import model_shape, read_model
from finetune_memory.estimate import quantised_shape
from finetune_memory.sharding import shards, units_of
from finetune_trainer.model import sharded
from finetune_trainer.objective.next_token import NextToken
from finetune_trainer.ranks.gang import joined
from tests.support.forked_ranks import run_processes
from tests.support.tiny_model import plan_of, tiny_spec, write_tiny_llama

MB = 10**6
ALLOWED_BYTES = 300 * MB
"""In addition to a shard and a layer."""
HEADS = {"num_attention_heads": 20, "num_key_value_heads": 10}
SIZES: dict[str, Any] = {"vocab_size": 32000, "hidden_size": 2560, "intermediate_size": 10240, **HEADS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, with commas")
    parser.add_argument("--layers", type=int, default=9, help="of 197 MB each; 9 make 2 GB")
    parser.add_argument("--versions", default="1,2", help="of FSDP, with commas")
    parser.add_argument("--whole", action="store_true", help="let every rank load the whole base")
    arguments = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        torch.set_default_dtype(torch.bfloat16)
        base = write_tiny_llama(root / "base", torch.bfloat16, num_hidden_layers=arguments.layers, **SIZES)
        tiny = write_tiny_llama(root / "tiny", torch.bfloat16)
        torch.set_default_dtype(torch.float32)
        stored = sum(path.stat().st_size for path in base.glob("*.safetensors"))
        print(f"model of {stored / MB:,.0f} MB; MB of each rank")
        print("ranks  FSDP   seconds    shard + layer + 300   grows by   of which stays   whole process")
        for ranks in map(int, arguments.ranks.split(",")):
            for version in map(int, arguments.versions.split(",")):
                allowed = _allowed(base, ranks, version)
                for found in _measure(root, base, tiny, ranks, version, whole=arguments.whole):
                    failed = failed or found["peak"] > allowed
                    print(
                        f"{ranks:5}  {version:4}  {found['seconds']:8.1f}  {allowed / MB:21,.0f}  {found['peak'] / MB:9,.0f}"
                        f"  {found['kept'] / MB:15,.0f}  {found['process'] / MB:14,.0f}"
                    )
    return int(failed)


def _spec(ranks: int, version: int) -> dict[str, Any]:
    return tiny_spec(
        method={"type": "QLoRA", "lora": {"r": 8}},
        parallelism={"processesPerNode": ranks, "fsdp": {"version": version}},
        training={"globalBatchSize": ranks, "precision": "bf16"},
    )


def _allowed(base: Path, ranks: int, version: int) -> int:
    """What the planner says that a rank keeps, its scales included, with a layer in bfloat16."""
    plan, files = plan_of(_spec(ranks, version)), read_model(base)
    elements = resolve_elements(plan, files.stored)
    shape = model_shape(plan, files)
    packed = quantised_shape(plan, shape, elements)
    kept = shards(units_of(packed), plan.parallelism.fsdp, ranks, 0, elements.param)
    layer = sum(each.num_bytes for each in shape.parameters if ".layers.0." in each.name)
    return kept.frozen + kept.trained + packed.constant_bytes + layer + ALLOWED_BYTES


def _measure(root: Path, base: Path, tiny: Path, ranks: int, version: int, *, whole: bool) -> list[dict[str, float]]:
    directory = Path(tempfile.mkdtemp(dir=root))
    bodies = [partial(_rank, rank, ranks, directory, _spec(ranks, version), tiny, base, whole) for rank in range(ranks)]
    codes = run_processes(bodies)
    if codes != [0] * ranks:
        raise SystemExit(f"a rank failed: {codes}")
    return [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def _rank(rank: int, ranks: int, directory: Path, spec: dict[str, Any], tiny: Path, base: Path, whole: bool) -> None:  # noqa: PLR0917 - as run in a process
    plan = plan_of(spec)
    if whole:
        vars(sharded)["unloaded_base_model"] = lambda *_: None
    with joined(rank, ranks, rank, f"file://{directory}/store") as gang:
        sharded.build(plan, tiny, gang, NextToken())
        gang.barrier()
        # The kernel's high-water mark starts again from what is resident now.
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before, started = _status("VmRSS"), time.perf_counter()
        model = sharded.build(plan, base, gang, NextToken())
        seconds = time.perf_counter() - started
        peak, after = _status("VmHWM"), _status("VmRSS")
        gang.barrier()
    found = {"seconds": seconds, "peak": peak - before, "kept": after - before, "process": peak, "pieces": len(model.pieces)}
    (directory / f"rank-{rank}.json").write_text(json.dumps(found))


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    sys.exit(main())

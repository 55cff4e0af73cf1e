"""The contenders of the training benchmarks run from start to end on a toy, and count the same tokens.

What they measure, a toy cannot show; that the trainer still takes these calls, it does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support.forked_ranks import run_processes

STEPS = 4
TOY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def write_workload(directory: Path, method: str, world_size: int) -> None:
    make_small()
    from bench.trainer import workload

    workload.write(directory, method, STEPS, world_size)


def make_small() -> None:
    from bench.trainer import workload

    workload.MODEL = {**TOY, "num_key_value_heads": 2, "max_position_embeddings": 256}
    workload.LENGTH, workload.MICRO_BATCH, workload.GLOBAL_BATCH = 64, 1, 4


def train(name: str, directory: Path, method: str, world_size: int, rank: int) -> None:
    make_small()
    from bench.trainer import contender

    contenders: dict[str, Callable[..., contender.Figures]] = {"ours": contender.ours, "bare": contender.bare}
    figures = contenders[name](directory, method, rank, world_size)
    (directory / f"figures-{rank}.json").write_text(json.dumps(figures))


def compute(path: Path) -> None:
    import torch

    from bench.gpu import contender

    starts, loss = contender.ours("tiny", STEPS, torch.device("cpu"))
    path.write_text(json.dumps([starts, loss]))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", ["ours", "bare"])
def test_a_contender_trains_all_steps_on_the_tokens_that_are_counted(tmp_path: Path, name: str, world_size: int) -> None:
    assert run_processes([partial(write_workload, tmp_path, "LoRA", world_size)]) == [0]
    work = [partial(train, name, tmp_path, "LoRA", world_size, rank) for rank in range(world_size)]
    assert run_processes(work) == [0] * world_size
    figures = json.loads((tmp_path / "figures-0.json").read_text())
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert len(figures["starts"]) == len(figures["busy"]) == STEPS + 1
    assert figures["starts"] == sorted(figures["starts"])
    assert figures["supervised_tokens"] == sum(supervised for _, supervised in counts)
    assert len(figures["losses"]) == STEPS
    assert all(math.isfinite(loss) for loss in figures["losses"])
    if (name, world_size) == ("ours", 2):
        assert figures["distribution"] == "FSDP 2, gathered parameters stay by the choice of the memory plan"


def test_the_gpu_benchmarks_own_contender_trains_all_steps(tmp_path: Path) -> None:
    assert run_processes([partial(compute, tmp_path / "found.json")]) == [0]
    starts, loss = json.loads((tmp_path / "found.json").read_text())
    assert len(starts) == STEPS + 1
    assert 0 < loss < 10

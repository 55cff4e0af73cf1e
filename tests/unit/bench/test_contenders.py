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

from finetune_trainer.json_lines import read_lines
from tests.support.forked_ranks import run_processes

STEPS = 4


def write_workload(directory: Path, method: str, world_size: int) -> None:
    from bench.trainer import workload

    workload.write(directory, method, STEPS, world_size, workload.TOY)


def train(name: str, directory: Path, method: str, world_size: int, rank: int) -> None:
    from bench.trainer import contender

    contenders: dict[str, Callable[..., contender.Figures]] = {"ours": contender.ours, "bare": contender.bare}
    figures = contenders[name](directory, method, rank, world_size)
    (directory / f"figures-{rank}.json").write_text(json.dumps(figures))


def train_on_gpu(name: str, directory: Path, rank: int, ranks: int) -> None:
    """The GPU benchmark's contender on the CPU."""
    import torch

    from bench.gpu import contender

    if name == "prepare":
        contender.prepare(directory, "tiny", STEPS, ranks, torch.device("cpu"))
        return
    starts, losses = contender.ours(directory, "tiny", STEPS, rank, ranks)
    (directory / f"figures-{rank}.json").write_text(json.dumps([starts, losses]))


@pytest.mark.parametrize(
    ("name", "world_size"),
    [("ours", 2), *(pytest.param(*each, marks=pytest.mark.nightly) for each in (("ours", 1), ("bare", 1), ("bare", 2)))],
)
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


def test_the_gpu_benchmarks_own_contender_is_a_job(tmp_path: Path) -> None:
    """It loads, shards, trains all steps, tells its history, saves and exports."""
    assert run_processes([partial(train_on_gpu, "prepare", tmp_path, 0, 2)]) == [0]
    assert run_processes([partial(train_on_gpu, "ours", tmp_path, rank, 2) for rank in range(2)]) == [0, 0]
    starts, losses = json.loads((tmp_path / "figures-0.json").read_text())
    assert starts == sorted(starts)
    assert (len(starts), len(losses)) == (STEPS + 1, STEPS)
    assert all(0 < loss < 10 for loss in losses)
    (workspace,) = (tmp_path / "workspace").iterdir()
    assert {line["step"] for line in read_lines((workspace / "history.jsonl").read_text())} == set(range(1, STEPS + 1))
    assert [path.name for path in (workspace / "checkpoints").glob("step-*")]
    assert (workspace / "trained" / "adapter_model.safetensors").is_file()

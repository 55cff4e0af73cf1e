"""A run that is killed at any moment and started again ends with the same bytes as one that nobody touched."""

import json
import shutil
import signal
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune_trainer.checkpoint.load import RangeReader, load, newest_valid
from finetune_trainer.checkpoint.manifest import Origin, RunState
from finetune_trainer.checkpoint.save import begin_save, commit_save
from finetune_trainer.checkpoint.state import PARAMETER, optimizer_entry, restore_count, state_form
from finetune_trainer.context import RunContext
from finetune_trainer.model.sharded import build
from finetune_trainer.objective.next_token import NextToken
from finetune_trainer.ranks.gang import Gang, joined
from finetune_trainer.train.optimizers import build_optimizer
from tests.support.forked_ranks import Fault, run_gang, run_processes, trained_files
from tests.support.tiny_model import run_context, tiny_spec

ORIGIN = Origin(learning_sha256="p" * 64, data_hash="d" * 64)
FEW = {"r": 4, "targetModules": ["q_proj", "v_proj"]}
"""Each adapter's matrices are units of their own in FSDP 1, whose messages take most of a small run's time."""
METHODS: dict[str, dict[str, Any]] = {
    "lora-fsdp2": {"method": {"type": "LoRA", "lora": {"r": 4, "loraDropout": "0.1"}}},
    "full-fsdp2": {"method": {"type": "Full", "lora": None}, "training": {"learningRate": "1e-3"}},
    # Rank 0 keeps no element of any trained parameter, and has nothing to clip.
    "norms-fsdp1": {
        "method": {"type": "LNTuning", "lora": None},
        "training": {"maxGradNorm": "0.001"},
        "parallelism": {"processesPerNode": 2, "fsdp": {"version": 1}},
        "merge": {"enabled": False},
    },
}


@pytest.fixture(scope="module")
def claims(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("undisturbed")


@cache
def undisturbed(claims: Path, method: str) -> dict[str, bytes]:
    context = run_context(claims / method, tiny_spec(**METHODS[method]))
    assert run_gang(context) == [0, 0]
    return trained_files(context)


# The kill suite draws other moments each time.
KILLS = [
    ("lora-fsdp2", Fault("train.step:optimizer_step", call=1)),
    ("lora-fsdp2", Fault("checkpoint.save:publish_directory", call=2)),
    ("lora-fsdp2", Fault("files:publish_directory", call=1)),
    ("norms-fsdp1", Fault("train.step:optimizer_step", call=4)),
    ("full-fsdp2", Fault("train.step:optimizer_step", call=4)),
]


@pytest.mark.parametrize(("method", "fault"), KILLS, ids=str)
def test_killed_run_resumes_to_the_same_bytes(claims: Path, tmp_path: Path, method: str, fault: Fault) -> None:
    expected = undisturbed(claims, method)
    context = run_context(tmp_path, tiny_spec(**METHODS[method]))
    codes = run_gang(context, [fault])
    assert codes[fault.rank] == -signal.SIGKILL
    assert not context.workspace.adapter.exists()
    assert run_gang(context) == [0, 0]
    assert trained_files(context) == expected
    assert _steps(context) == list(range(7))
    assert not [*context.workspace.checkpoints.rglob("*.tmp-*"), *context.workspace.root.glob("*.tmp-*")]


def test_finished_run_exports_the_same_again(claims: Path, tmp_path: Path) -> None:
    expected = undisturbed(claims, "lora-fsdp2")
    shutil.copytree(claims / "lora-fsdp2", tmp_path, dirs_exist_ok=True)
    context = run_context(tmp_path, tiny_spec(**METHODS["lora-fsdp2"]))
    shutil.rmtree(context.workspace.adapter)
    assert run_gang(context) == [0, 0]
    assert trained_files(context) == expected


SHARDINGS: list[dict[str, Any]] = [{"version": 2}, {"version": 1, "peftWrapPolicy": False, "useOrigParams": True}, {"version": 1}]


def test_a_checkpoint_of_any_sharding_is_read_by_any_other(tmp_path: Path) -> None:
    """Written by three ranks, read by one, two and three ranks of every kind of sharding, and written again by each."""
    contexts = [
        run_context(tmp_path, tiny_spec(method={"lora": FEW}, parallelism={"processesPerNode": 1, "fsdp": fsdp}))
        for fsdp in SHARDINGS
    ]
    written = [(context, None, tmp_path / f"written-{number}") for number, context in enumerate(contexts)]
    assert rewrite(written, tmp_path, 3) == [0, 0, 0]
    for ranks in (1, 2, 3):
        rewritten = [
            (context, source, source.with_name(f"{source.name}-{kind}-{ranks}"))
            for _, _, source in written
            for kind, context in enumerate(contexts)
        ]
        assert rewrite(rewritten, tmp_path, ranks) == [0] * ranks
        for _, source, target in rewritten:
            assert source is not None
            expected, found = state_of(source), state_of(target)
            assert len(expected) == 3 * 8
            assert set(found) == set(expected)
            assert all(torch.equal(found[key], expected[key]) for key in expected), target.name


Rewriting = tuple[RunContext, Path | None, Path]
"""By whom, from where, None for made up values, and to where."""


def rewrite(work: list[Rewriting], directory: Path, ranks: int) -> list[int]:
    store = f"file://{directory}/store-{ranks}-{len(work)}"
    return run_processes([partial(_rewrite_all, work, rank, ranks, store) for rank in range(ranks)])


def _rewrite_all(work: list[Rewriting], rank: int, ranks: int, store: str) -> None:
    with joined(rank, ranks, rank, store) as gang:
        for context, source, target in work:
            _rewrite(context, source, target, gang)


def _rewrite(context: RunContext, source: Path | None, target: Path, gang: Gang) -> None:
    model = build(context.plan, context.base_model, gang, NextToken())
    optimizer = build_optimizer(model.pieces, context.plan)
    if source is not None:
        found = newest_valid(source, gang, ORIGIN)
        assert found is not None
        load(*found, model.pieces, optimizer)
    else:
        torch.manual_seed(gang.rank)
        for piece in model.pieces:
            for kind in (PARAMETER, *state_form(optimizer).tensors):
                with torch.no_grad():
                    piece.values(kind, optimizer).uniform_()
        restore_count(optimizer, optimizer_entry(optimizer).model_copy(update={"step": 5.0}))
    writing = begin_save(
        target, step=5, ranges=model.pieces, optimizer=optimizer, gang=gang, origin=ORIGIN, state=RunState(), best_step=None
    )
    commit_save(target, writing, gang, keep=2)


def state_of(root: Path) -> dict[tuple[str, str], torch.Tensor]:
    alone = Gang(0, 1, 0, torch.device("cpu"), None)
    found = newest_valid(root, alone, ORIGIN)
    assert found is not None
    reader = RangeReader(*found)
    state = {}
    for name in reader.names:
        shape, dtype = reader.form(name)
        for kind in (PARAMETER, *found[1].optimizer.tensors):
            state[kind, name] = torch.empty(shape, dtype=dtype)
            reader.read_into(kind, name, 0, state[kind, name].view(-1))
    return state


def _steps(context: RunContext) -> list[int]:
    return [json.loads(line)["step"] for line in context.workspace.history.read_text().splitlines()]

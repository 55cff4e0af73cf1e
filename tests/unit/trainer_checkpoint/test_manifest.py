"""A checkpoint that is not byte for byte what was written is never used; the one before it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from finetune_trainer.checkpoint.load import full_parameters, load, newest_valid
from finetune_trainer.checkpoint.manifest import Manifest, RunState, decode, read
from finetune_trainer.checkpoint.names import MANIFEST, directory_name, rank_file, step_of
from finetune_trainer.checkpoint.retention import checkpoint_directories, outdated
from finetune_trainer.checkpoint.save import save
from finetune_trainer.checkpoint.state import create_moments, pieces
from finetune_trainer.errors import CheckpointError
from finetune_trainer.gang import Gang

PLAN, DATA = "p" * 64, "d" * 64
ALONE = Gang(0, 1, 0, torch.device("cpu"), None)


def model_and_optimizer(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    create_moments(optimizer)
    for state in optimizer.state.values():
        state["exp_avg"].normal_()
        state["exp_avg_sq"].uniform_()
        state["step"].fill_(seed)
    return model, optimizer


def write(root: Path, step: int, keep: int = 2) -> None:
    model, optimizer = model_and_optimizer(step)
    save(
        root,
        step=step,
        found=pieces(model),
        optimizer=optimizer,
        gang=ALONE,
        plan_sha256=PLAN,
        data_hash=DATA,
        state=RunState(eval_loss=1.5),
        keep=keep,
    )


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [optimizer.state[parameter] for parameter in model.parameters()]
    return [*model.parameters(), *(state[kind] for state in states for kind in ("exp_avg", "exp_avg_sq", "step"))]


def used_step(root: Path) -> int | None:
    found = newest_valid(root, ALONE, PLAN, DATA)
    return found[1].step if found else None


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    write(tmp_path, 4)
    found = newest_valid(tmp_path, ALONE, PLAN, DATA)
    assert found is not None
    model, optimizer = model_and_optimizer(99)
    load(*found, pieces(model), optimizer)
    for loaded, saved in zip(contents(model, optimizer), contents(*model_and_optimizer(4)), strict=True):
        assert torch.equal(loaded, saved)
    assert found[1].state.eval_loss == 1.5
    whole = dict(full_parameters(*found))
    assert all(torch.equal(whole[name], parameter) for name, parameter in model.named_parameters())


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("two") / "checkpoints"
    root.mkdir()
    write(root, 1)
    write(root, 2)
    return root


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([MANIFEST, rank_file(0)]), st.floats(0, 1, exclude_max=True), st.integers(1, 255))
def test_any_changed_byte_is_refused_and_the_previous_one_used(two_checkpoints: Path, name: str, place: float, change: int) -> None:
    path = two_checkpoints / directory_name(2) / name
    original = path.read_bytes()
    damaged = bytearray(original)
    damaged[int(place * len(damaged))] ^= change
    try:
        path.write_bytes(damaged)
        assert used_step(two_checkpoints) == 1
    finally:
        path.write_bytes(original)
    assert used_step(two_checkpoints) == 2


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([MANIFEST, rank_file(0)]), st.floats(0, 1, exclude_max=True))
def test_truncated_files_are_refused(two_checkpoints: Path, name: str, share: float) -> None:
    path = two_checkpoints / directory_name(2) / name
    original = path.read_bytes()
    try:
        path.write_bytes(original[: int(share * len(original))])
        assert used_step(two_checkpoints) == 1
        path.unlink()
        assert used_step(two_checkpoints) == 1
    finally:
        path.write_bytes(original)


def test_foreign_and_incomplete_checkpoints_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / directory_name(9)).mkdir()
    (tmp_path / f"{directory_name(8)}.tmp-abc").mkdir()
    assert used_step(tmp_path) == 1
    assert not list(tmp_path.glob("*.tmp-*"))
    with pytest.raises(CheckpointError, match="belongs to plan"):
        read(tmp_path / directory_name(1), "q" * 64, DATA)
    assert newest_valid(tmp_path, ALONE, "q" * 64, DATA) is None
    assert newest_valid(tmp_path, ALONE, PLAN, "e" * 64) is None


def test_a_checkpoint_of_other_parameters_is_not_loaded(tmp_path: Path) -> None:
    write(tmp_path, 1)
    found = newest_valid(tmp_path, ALONE, PLAN, DATA)
    assert found is not None
    other = nn.Sequential(nn.Linear(5, 7))
    with pytest.raises(CheckpointError, match="other parameters"):
        load(*found, pieces(other), torch.optim.AdamW(other.parameters()))
    wider = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3))
    with pytest.raises(CheckpointError, match="shape"):
        load(*found, pieces(wider), torch.optim.AdamW(wider.parameters()))


def test_old_checkpoints_go_but_never_below_two_valid(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        write(tmp_path, step, keep=2)
    assert [step_of(path.name) for path in checkpoint_directories(tmp_path)] == [4, 3]
    (tmp_path / directory_name(4) / MANIFEST).write_text("{}")
    write(tmp_path, 5, keep=2)
    assert [step_of(path.name) for path in checkpoint_directories(tmp_path)] == [5, 4, 3]
    assert (tmp_path / "latest").read_text() == f"{directory_name(5)}\n"


@given(st.dictionaries(st.integers(0, 50), st.booleans(), max_size=12), st.integers(0, 5))
def test_pruning_keeps_the_newest_valid_ones(validity: dict[int, bool], keep: int) -> None:
    removed = set(outdated(validity, keep))
    valid = sorted(step for step, is_valid in validity.items() if is_valid)
    kept = [step for step in valid if step not in removed]
    assert kept == valid[-max(keep, 2) :] or len(kept) == len(valid) <= max(keep, 2)
    assert all(step < kept[0] for step in removed)


def test_manifest_reads_back(tmp_path: Path) -> None:
    manifest = Manifest(step=3, optimizer_step=3.0, plan_sha256=PLAN, data_hash=DATA, world_size=1, state=RunState(), files=[])
    assert decode(manifest.encode()) == manifest
    for wrong in (b"", b"[]", b"{}", b"null", manifest.encode() + b" ", manifest.encode().replace(b'"step":3', b'"step":4')):
        with pytest.raises(CheckpointError):
            decode(wrong)

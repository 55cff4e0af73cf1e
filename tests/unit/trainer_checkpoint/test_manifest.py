"""A checkpoint that is not byte for byte what was written is never used; the one before it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from finetune_trainer.checkpoint.load import full_parameters, load, newest_valid
from finetune_trainer.checkpoint.manifest import Manifest, OptimizerEntry, Origin, RunState, decode, read
from finetune_trainer.checkpoint.names import MANIFEST, directory_name, rank_file, step_of
from finetune_trainer.checkpoint.optimizer_state import create_state, described
from finetune_trainer.checkpoint.retention import checkpoint_directories, outdated
from finetune_trainer.checkpoint.save import begin, commit
from finetune_trainer.checkpoint.state import pieces
from finetune_trainer.errors import CheckpointError, InvariantError
from finetune_trainer.ranks.gang import Gang

ORIGIN = Origin(learning_sha256="p" * 64, data_hash="d" * 64)
OTHER_RUN, OTHER_DATA = (ORIGIN.model_copy(update={name: "e" * 64}) for name in ("learning_sha256", "data_hash"))
ALONE = Gang(0, 1, 0, torch.device("cpu"), None)


def model_and_optimizer(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    create_state(optimizer)
    for state in optimizer.state.values():
        state["exp_avg"].normal_()
        state["exp_avg_sq"].uniform_()
        state["step"].fill_(seed)
    return model, optimizer


def save(
    root: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, keep: int = 2, best_step: int | None = None
) -> None:
    state = RunState(eval_loss=1.5)
    writing = begin(
        root,
        step=step,
        found=pieces(model),
        optimizer=optimizer,
        gang=ALONE,
        origin=ORIGIN,
        state=state,
        best_step=best_step,
    )
    commit(root, writing, ALONE, keep)


def write(root: Path, step: int, keep: int = 2, best_step: int | None = None) -> None:
    save(root, step, *model_and_optimizer(step), keep=keep, best_step=best_step)


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [optimizer.state[parameter] for parameter in model.parameters()]
    return [*model.parameters(), *(state[kind] for state in states for kind in ("exp_avg", "exp_avg_sq", "step"))]


def used_step(root: Path) -> int | None:
    found = newest_valid(root, ALONE, ORIGIN)
    return found[1].step if found else None


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    write(tmp_path, 4)
    found = newest_valid(tmp_path, ALONE, ORIGIN)
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
    for foreign, message in ((OTHER_RUN, "belongs to run"), (OTHER_DATA, "was trained on data")):
        with pytest.raises(CheckpointError, match=message):
            read(tmp_path / directory_name(1), foreign)
        assert newest_valid(tmp_path, ALONE, foreign) is None


def test_every_byte_of_the_manifest_counts(two_checkpoints: Path) -> None:
    path = two_checkpoints / directory_name(2) / MANIFEST
    original = path.read_bytes()
    for place in range(len(original)):
        for change in (0x01, 0x20, 0x80):
            damaged = bytearray(original)
            damaged[place] ^= change
            with pytest.raises(CheckpointError):
                decode(bytes(damaged))
    assert decode(original).step == 2


def test_swapped_linked_and_foreign_files_are_refused(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path, step)
    newest, other = (tmp_path / directory_name(step) / rank_file(0) for step in (2, 1))
    original, foreign = newest.read_bytes(), other.read_bytes()
    assert len(original) == len(foreign)
    newest.write_bytes(foreign)
    assert used_step(tmp_path) == 1
    newest.unlink()
    (tmp_path / "elsewhere").write_bytes(original)
    newest.symlink_to(tmp_path / "elsewhere")
    assert used_step(tmp_path) == 1
    newest.unlink()
    newest.write_bytes(original)
    # What the manifest does not name is never read, so file systems may leave their own files there.
    (newest.parent / rank_file(1)).write_bytes(original)
    assert used_step(tmp_path) == 2


def test_a_manifest_names_one_file_for_each_rank(tmp_path: Path) -> None:
    write(tmp_path, 1)
    path = tmp_path / directory_name(1) / MANIFEST
    manifest = decode(path.read_bytes())
    for changes in ({"world_size": 2}, {"files": []}, {"files": [manifest.files[0].model_copy(update={"name": "../other"})]}):
        path.write_bytes(manifest.model_copy(update=changes).encode())
        assert used_step(tmp_path) is None


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "RAdam": torch.optim.RAdam,
    "SGD": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    "SGD without momentum": torch.optim.SGD,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_resumes_to_the_same_bytes(tmp_path: Path, name: str) -> None:
    def trained(steps: range, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in steps:
            torch.manual_seed(step)
            model(torch.randn(4, 5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        optimizer = OPTIMIZERS[name](model.parameters())
        create_state(optimizer)
        return model, optimizer

    model, optimizer = fresh()
    trained(range(3), model, optimizer)
    save(tmp_path, 3, model, optimizer)
    trained(range(3, 6), model, optimizer)
    resumed, fresh_optimizer = fresh()
    found = newest_valid(tmp_path, ALONE, ORIGIN)
    assert found is not None
    load(*found, pieces(resumed), fresh_optimizer)
    trained(range(3, 6), resumed, fresh_optimizer)
    for expected, parameter in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(expected, parameter)
        assert described(fresh_optimizer) == described(optimizer)
    other = OPTIMIZERS["SGD" if name != "SGD" else "AdamW"](resumed.parameters())
    with pytest.raises(CheckpointError, match="holds state of"):
        load(*found, pieces(resumed), other)


def test_optimizer_state_that_is_not_whole_is_noticed() -> None:
    model, optimizer = model_and_optimizer(1)
    first, second, *_ = model.parameters()
    optimizer.state[first]["step"].fill_(2)
    with pytest.raises(InvariantError, match="different steps"):
        described(optimizer)
    optimizer.state[first]["step"].fill_(1)
    del optimizer.state[second]["exp_avg"]
    with pytest.raises(InvariantError, match="has optimizer state"):
        described(optimizer)


def test_a_checkpoint_of_other_parameters_is_not_loaded(tmp_path: Path) -> None:
    write(tmp_path, 1)
    found = newest_valid(tmp_path, ALONE, ORIGIN)
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


def test_the_best_checkpoint_stays_while_a_kept_one_names_it(tmp_path: Path) -> None:
    for step, best in ((1, None), (2, 2), (3, 2), (4, 2), (5, 5)):
        write(tmp_path, step, best_step=best)
    # A run that has to resume from 4, because 5 was damaged, may still export 2.
    assert [step_of(path.name) for path in checkpoint_directories(tmp_path)] == [5, 4, 2]
    write(tmp_path, 6, best_step=5)
    assert [step_of(path.name) for path in checkpoint_directories(tmp_path)] == [6, 5]


@given(st.dictionaries(st.integers(0, 50), st.none() | st.integers(0, 50), max_size=12), st.integers(0, 5), st.data())
def test_pruning_keeps_the_newest_valid_ones_and_the_best(best: dict[int, int | None], keep: int, data: st.DataObject) -> None:
    damaged = data.draw(st.sets(st.sampled_from(sorted(best)))) if best else set()
    found = {step: None if step in damaged else manifest_of(step, best_step) for step, best_step in best.items()}
    removed = set(outdated(found, keep))
    valid = sorted(set(best) - damaged)
    newest = valid[-max(keep, 2) :]
    assert not removed & set(newest)
    assert not removed & {best[step] for step in newest}
    if len(newest) < max(keep, 2):
        assert not removed
    else:
        assert removed == {step for step in best if step < newest[0]} - {best[step] for step in newest}


def manifest_of(step: int, best_step: int | None = None) -> Manifest:
    optimizer = OptimizerEntry(name="AdamW", tensors=["exp_avg", "exp_avg_sq"], step=float(step))
    return Manifest(step=step, optimizer=optimizer, origin=ORIGIN, world_size=0, best_step=best_step, state=RunState(), files=[])


def test_manifest_reads_back() -> None:
    manifest = manifest_of(3)
    assert decode(manifest.encode()) == manifest
    for wrong in (b"", b"[]", b"{}", b"null", manifest.encode() + b" ", manifest.encode().replace(b'"step":3,', b'"step":4,')):
        with pytest.raises(CheckpointError):
            decode(wrong)

"""A checkpoint that is not byte for byte what was written is never used; the one before it is."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from finetune_job.layout import checkpoint_name
from finetune_trainer.checkpoint.load import full_parameters, load, newest_valid, verified_manifest
from finetune_trainer.checkpoint.manifest import MANIFEST, FileEntry, decode_manifest, rank_file, read_manifest
from finetune_trainer.checkpoint.state import pieces
from finetune_trainer.errors import CheckpointError
from finetune_trainer.ranks.gang import Gang
from tests.unit.finetune_trainer.checkpoint.saved_models import ALONE, ORIGIN, manifest_of, model_and_optimizer, write

OTHER_RUN, OTHER_DATA = (ORIGIN.model_copy(update={name: "e" * 64}) for name in ("learning_sha256", "data_hash"))


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
def test_any_changed_byte_is_refused_and_the_previous_one_used(
    two_checkpoints: Path, name: str, place: float, change: int
) -> None:
    path = two_checkpoints / checkpoint_name(2) / name
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
    path = two_checkpoints / checkpoint_name(2) / name
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
    (tmp_path / checkpoint_name(9)).mkdir()
    (tmp_path / f"{checkpoint_name(8)}.tmp-abc").mkdir()
    assert used_step(tmp_path) == 1
    assert not list(tmp_path.glob("*.tmp-*"))
    for foreign, message in ((OTHER_RUN, "belongs to run"), (OTHER_DATA, "was trained on data")):
        with pytest.raises(CheckpointError, match=message):
            read_manifest(tmp_path / checkpoint_name(1), foreign)
        assert newest_valid(tmp_path, ALONE, foreign) is None


def test_every_byte_of_the_manifest_counts(two_checkpoints: Path) -> None:
    path = two_checkpoints / checkpoint_name(2) / MANIFEST
    original = path.read_bytes()
    for place in range(len(original)):
        for change in (0x01, 0x20, 0x80):
            damaged = bytearray(original)
            damaged[place] ^= change
            with pytest.raises(CheckpointError):
                decode_manifest(bytes(damaged))
    assert decode_manifest(original).step == 2


def test_swapped_linked_and_foreign_files_are_refused(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path, step)
    newest, other = (tmp_path / checkpoint_name(step) / rank_file(0) for step in (2, 1))
    original, foreign = newest.read_bytes(), other.read_bytes()
    assert len(original) == len(foreign)
    newest.write_bytes(foreign)
    assert used_step(tmp_path) == 1
    newest.unlink()
    (tmp_path / "elsewhere").write_bytes(original)
    newest.symlink_to(tmp_path / "elsewhere")
    assert used_step(tmp_path) == 1
    newest.unlink()
    newest.write_bytes(original[:-1])
    with pytest.raises(CheckpointError, match=f"has {len(original) - 1} bytes, but {len(original)} were written"):
        read_manifest(newest.parent, ORIGIN)
    newest.write_bytes(original)
    # What the manifest does not name is never read, so file systems may leave their own files there.
    (newest.parent / rank_file(1)).write_bytes(original)
    assert used_step(tmp_path) == 2


def test_a_manifest_names_one_file_for_each_rank(tmp_path: Path) -> None:
    write(tmp_path, 1)
    path = tmp_path / checkpoint_name(1) / MANIFEST
    manifest = decode_manifest(path.read_bytes())
    for changes in ({"world_size": 2}, {"files": []}, {"files": [manifest.files[0].model_copy(update={"name": "../other"})]}):
        path.write_bytes(manifest.model_copy(update=changes).encode())
        assert used_step(tmp_path) is None


@dataclass(frozen=True)
class RankOf:
    """One of several ranks, which hears of no other."""

    rank: int
    world_size: int

    def gather(self, value: str, form: type[str]) -> list[str]:
        return [value]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_every_file_is_hashed_by_one_rank_however_many_wrote_and_read(tmp_path: Path, world_size: int) -> None:
    directory = tmp_path / checkpoint_name(3)
    directory.mkdir()
    files = [rank_file(rank) for rank in range(5)]
    entries = []
    for name in files:
        (directory / name).write_bytes(name.encode())
        entries.append(FileEntry(name=name, size=len(name), sha256=hashlib.sha256(name.encode()).hexdigest(), pieces=[]))
    manifest = manifest_of(3).model_copy(update={"files": entries, "world_size": len(files)})
    (directory / MANIFEST).write_bytes(manifest.encode())
    ranks = [cast("Gang", RankOf(rank, world_size)) for rank in range(world_size)]
    assert all(verified_manifest(directory, rank, ORIGIN)[0] == manifest for rank in ranks)
    for damaged in files:
        content = (directory / damaged).read_bytes()
        (directory / damaged).write_bytes(content[::-1])
        problems = [problem for rank in ranks for problem in verified_manifest(directory, rank, ORIGIN)[1]]
        assert len(problems) == 1
        assert damaged in problems[0]
        (directory / damaged).write_bytes(content)


def test_a_checkpoint_of_other_parameters_is_not_loaded(tmp_path: Path) -> None:
    write(tmp_path, 1)
    found = newest_valid(tmp_path, ALONE, ORIGIN)
    assert found is not None
    other = nn.Sequential(nn.Linear(5, 7))
    with pytest.raises(CheckpointError, match="holds parameters other than"):
        load(*found, pieces(other), torch.optim.AdamW(other.parameters()))
    wider = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3))
    with pytest.raises(CheckpointError, match="shape"):
        load(*found, pieces(wider), torch.optim.AdamW(wider.parameters()))


def test_manifest_reads_back() -> None:
    manifest = manifest_of(3)
    assert decode_manifest(manifest.encode()) == manifest
    for wrong in (b"", b"[]", b"{}", b"null", manifest.encode() + b" ", manifest.encode().replace(b'"step":3,', b'"step":4,')):
        with pytest.raises(CheckpointError):
            decode_manifest(wrong)


def test_first_values_belong_to_the_origin_and_are_named_only_where_there_are_some(tmp_path: Path) -> None:
    """Releases that knew none read what they would have written themselves."""
    write(tmp_path, 1)
    path = tmp_path / checkpoint_name(1) / MANIFEST
    assert json.loads(path.read_bytes())["origin"] == {"data_hash": "d" * 64, "learning_sha256": "p" * 64}
    origin = ORIGIN.model_copy(update={"first_values": "f"})
    with pytest.raises(CheckpointError, match="was trained from first values None, but f"):
        read_manifest(path.parent, origin)
    path.write_bytes(read_manifest(path.parent, ORIGIN).model_copy(update={"origin": origin}).encode())
    assert read_manifest(path.parent, origin).origin.first_values == "f"
    with pytest.raises(CheckpointError, match="was trained from first values f, but None were computed"):
        read_manifest(path.parent, ORIGIN)

"""A manifest is read where every name, size and origin is what it says, and progress is known where a file tells of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune_job.layout import WorkspaceLayout
from finetune_trainer.checkpoint.evidence import recorded_progress
from finetune_trainer.checkpoint.manifest import FileEntry, Manifest, OptimizerEntry, Origin, RunState, read_manifest
from finetune_trainer.errors import CheckpointError, ForeignCheckpointError

ORIGIN = Origin(learning_sha256="a", data_hash="b")


def written(root: Path, *, step: int = 3, name: str = "step-0000000003", num_bytes: int = 4) -> Path:
    directory = root / name
    directory.mkdir()
    (directory / "rank-00000.safetensors").write_bytes(b"x" * num_bytes)
    manifest = Manifest(
        step=step,
        optimizer=OptimizerEntry(name="AdamW", tensors=[], step=None),
        origin=ORIGIN,
        world_size=1,
        state=RunState(),
        files=[FileEntry(name="rank-00000.safetensors", size=4, sha256="c", pieces=[])],
    )
    (directory / "manifest.json").write_bytes(manifest.encode())
    return directory


def test_what_is_whole_is_read(tmp_path: Path) -> None:
    assert read_manifest(written(tmp_path), ORIGIN).step == 3


def test_a_directory_of_another_step_than_its_name_says_is_damaged(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds the checkpoint of step 2, which its name does not say"):
        read_manifest(written(tmp_path, step=2), ORIGIN)


@pytest.mark.parametrize("num_bytes", [0, 3, 5])
def test_a_file_of_another_size_is_damaged(tmp_path: Path, num_bytes: int) -> None:
    with pytest.raises(CheckpointError, match=f"has {num_bytes} bytes, 4 were written"):
        read_manifest(written(tmp_path, num_bytes=num_bytes), ORIGIN)


def test_a_file_that_is_missing_or_a_link_is_damaged(tmp_path: Path) -> None:
    directory = written(tmp_path)
    file = directory / "rank-00000.safetensors"
    file.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is missing"):
        read_manifest(directory, ORIGIN)
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is missing"):
        read_manifest(directory, ORIGIN)


def test_a_checkpoint_of_another_run_or_of_other_data_is_refused(tmp_path: Path) -> None:
    directory = written(tmp_path)
    with pytest.raises(ForeignCheckpointError, match="belongs to run a, this is other"):
        read_manifest(directory, Origin(learning_sha256="other", data_hash="b"))
    with pytest.raises(CheckpointError, match="was trained on data b, prepared is other"):
        read_manifest(directory, Origin(learning_sha256="a", data_hash="other"))
    with pytest.raises(CheckpointError, match="was trained from first values None, computed are d"):
        read_manifest(directory, Origin(learning_sha256="a", data_hash="b", first_values="d"))


def test_first_values_are_named_only_where_there_are_some(tmp_path: Path) -> None:
    """Releases that knew none read what they would have written themselves."""
    path = written(tmp_path) / "manifest.json"
    assert json.loads(path.read_bytes())["origin"] == {"data_hash": "b", "learning_sha256": "a"}
    origin = ORIGIN.model_copy(update={"first_values": "d"})
    path.write_bytes(read_manifest(path.parent, ORIGIN).model_copy(update={"origin": origin}).encode())
    assert read_manifest(path.parent, origin).origin.first_values == "d"
    with pytest.raises(CheckpointError, match="was trained from first values d, computed are None"):
        read_manifest(path.parent, ORIGIN)


@pytest.mark.parametrize(("step", "known"), [(0, None), (1, 1), (22, 22)])
def test_one_completed_step_is_progress(tmp_path: Path, step: int, known: int | None) -> None:
    workspace = WorkspaceLayout(tmp_path)
    workspace.history.write_text(json.dumps({"step": step, "checkpoint_step": step}) + "\n", encoding="utf-8")
    found = recorded_progress(workspace)
    assert (None if found is None else found.step) == known


def test_a_name_of_the_newest_checkpoint_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    workspace = WorkspaceLayout(tmp_path)
    workspace.checkpoints.mkdir()
    assert recorded_progress(workspace) is None
    (workspace.checkpoints / "latest").mkdir()
    with pytest.raises(OSError, match="latest"):
        recorded_progress(workspace)

"""Values of checkpoints and results against each other, whatever files they are in."""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from finetune_trainer.checkpoint import compare
from finetune_trainer.checkpoint.compare import checkpoint_difference, results_difference
from finetune_trainer.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    OptimizerEntry,
    Origin,
    RangeEntry,
    RunState,
    rank_file,
)
from finetune_trainer.errors import CheckpointError

VALUES = {"param/a": torch.arange(6.0), "exp_avg/a": torch.arange(6.0) / 10}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_CHUNK_BYTES", 5)


def written(directory: Path, values: Mapping[str, torch.Tensor] = VALUES, cuts: Sequence[int] = (), **changes: Any) -> Path:
    """A checkpoint whose parameter is cut there, a part in the file of each rank."""
    directory.mkdir()
    size = len(next(iter(values.values())))
    bounds = [0, *cuts, size]
    files = []
    for rank, (start, stop) in enumerate(pairwise(bounds)):
        save_file({key: value[start:stop].clone() for key, value in values.items()}, directory / rank_file(rank))
        piece = RangeEntry(name="a", shape=[size], dtype="float32", start=start, stop=stop)
        files.append(FileEntry(name=rank_file(rank), size=0, sha256="", pieces=[piece]))
    fields: dict[str, Any] = {
        "step": 4,
        "optimizer": OptimizerEntry(name="AdamW", tensors=["exp_avg"], step=4.0),
        "state": RunState(eval_loss=0.5),
    }
    manifest = Manifest(
        **{**fields, **changes}, origin=Origin(learning_sha256="", data_hash=""), world_size=len(files), files=files
    )
    (directory / MANIFEST).write_bytes(manifest.encode())
    return directory


def with_value(key: str, index: int, value: float) -> dict[str, torch.Tensor]:
    changed = {name: tensor.clone() for name, tensor in VALUES.items()}
    changed[key][index] = value
    return changed


def test_the_same_values_in_other_files_are_the_same(tmp_path: Path) -> None:
    assert checkpoint_difference(written(tmp_path / "one"), written(tmp_path / "three", cuts=(1, 4))) is None


@pytest.mark.parametrize(
    ("values", "changes", "said"),
    [
        (with_value("param/a", 4, 9.0), {}, "param/a differs from value 4 on"),
        # Minus zero is another byte, and the first tensor counts.
        (with_value("exp_avg/a", 0, -0.0), {}, "exp_avg/a differs from value 0 on"),
        ({"param/a": VALUES["param/a"]}, {}, "exp_avg/a is missing"),
        ({**VALUES, "exp_avg_sq/a": torch.zeros(6)}, {}, "exp_avg_sq/a is unexpected"),
        ({name: each.half() for name, each in VALUES.items()}, {}, "exp_avg/a has 6 values of F16, not 6 of F32"),
        (VALUES, {"state": RunState(eval_loss=0.25)}, "eval_loss is 0.25, not 0.5"),
        (VALUES, {"step": 5}, "step is 5, not 4"),
    ],
)
def test_the_first_difference_is_named(
    tmp_path: Path, values: dict[str, torch.Tensor], changes: dict[str, Any], said: str
) -> None:
    difference = checkpoint_difference(
        written(tmp_path / "ours", cuts=(2,)), written(tmp_path / "theirs", values, (3,), **changes)
    )
    assert str(difference).startswith(said)


def test_values_that_no_file_holds_are_an_error(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole", cuts=(2, 4))
    holes = json.loads((whole / MANIFEST).read_bytes())
    del holes["sha256"]
    holes["files"][1]["pieces"][0]["start"] = 3
    (whole / MANIFEST).write_bytes(Manifest.model_validate(holes).encode())
    with pytest.raises(CheckpointError, match="exp_avg/a has no values 2 to 3"):
        checkpoint_difference(whole, written(tmp_path / "other"))


def test_results_are_compared_by_tensors_and_other_files_by_bytes(tmp_path: Path) -> None:
    names = ["adapter_config.json", "adapter_model.safetensors"]
    for name, value in (("ours", 1.0), ("theirs", 2.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / names[0]).write_text(name)
        save_file({"lora_A": torch.zeros(2), "lora_B": torch.tensor([0.0, value])}, tmp_path / name / names[1])
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    assert str(results_difference(ours, theirs, names)) == "lora_B differs from value 1 on"
    assert str(results_difference(ours, theirs, names[:1])) == "adapter_config.json has different bytes"
    assert results_difference(ours, ours, names) is None
    # Also what no tensor holds.
    save_file({"lora_A": torch.zeros(2), "lora_B": torch.tensor([0.0, 2.0])}, ours / names[1])
    save_file({"lora_A": torch.zeros(2), "lora_B": torch.tensor([0.0, 2.0])}, theirs / names[1], {"format": "pt"})
    assert str(results_difference(ours, theirs, names)) == "adapter_model.safetensors has different bytes"
    (theirs / names[1]).unlink()
    assert str(results_difference(ours, theirs, names)) == f"adapter_model.safetensors is missing in {theirs}"

"""Files that disagree with their headers are refused by name."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from finetune_trainer.weights import errors
from finetune_trainer.weights.headers import read_checkpoint, read_header


@pytest.mark.parametrize("cut", [1, 1000, "header", "length"])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, cut: int | str) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(64, 64)}, path)
    size = path.stat().st_size
    os.truncate(path, {"header": 20, "length": 5}.get(cut, 0) if isinstance(cut, str) else size - cut)
    with pytest.raises(errors.BrokenCheckpointError, match=str(path)):
        read_header(path)


def test_bytes_after_the_last_tensor_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(4)}, path)
    with path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(errors.BrokenCheckpointError, match="foreign bytes"):
        read_header(path)


def test_a_shard_of_another_save_is_refused(tmp_path: Path) -> None:
    save_file({"other": torch.zeros(4)}, tmp_path / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"weight": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(errors.BrokenCheckpointError, match="different saves"):
        read_checkpoint(tmp_path)

"""The search for NaN and infinity, over element types, places and names."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from finetune_trainer.weights import finite
from finetune_trainer.weights.errors import BrokenCheckpointError
from finetune_trainer.weights.finite import first_not_finite
from finetune_trainer.weights.headers import read_checkpoint


def found(directory: Path, tensors: dict[str, torch.Tensor]) -> str | None:
    save_file(tensors, directory / "model.safetensors")
    header = first_not_finite(directory)
    return None if header is None else header.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), "largest", "smallest"])
@pytest.mark.parametrize("place", [0, 7, 8, -1])
def test_a_value_is_found_in_any_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, value: float | str, place: int
) -> None:
    monkeypatch.setattr(finite, "_BLOCK", 8)
    ends = {"largest": torch.finfo(dtype).max, "smallest": torch.finfo(dtype).min}
    wrong = torch.zeros(5, 4, dtype=dtype)
    wrong.view(-1)[place] = ends.get(value, value) if isinstance(value, str) else value
    tensors = {"a.weight": torch.ones(3, dtype=dtype), "b.weight": wrong, "c.weight": torch.zeros(0, dtype=dtype)}
    assert found(tmp_path, tensors) == (None if value in ends else "b.weight")


def test_infinity_in_a_stored_mask_is_meant(tmp_path: Path) -> None:
    hidden = torch.full((2, 2), float("-inf"))
    assert found(tmp_path, {"h.0.attn.bias": hidden.clone(), "h.0.attn.masked_bias": hidden.clone(), "a": torch.ones(1)}) is None
    for name in ("h.0.attn.q_proj.bias", "model.unmasked_proj.weight", "cls.masked_lm.dense.weight"):
        assert found(tmp_path, {name: hidden}) == name


def test_whole_numbers_are_finite(tmp_path: Path) -> None:
    assert (
        found(tmp_path, {"ids": torch.full((3,), -1, dtype=torch.int16), "packed": torch.full((3,), 255).to(torch.uint8)}) is None
    )


def test_file_that_is_cut_while_it_is_read_is_an_error_and_no_signal(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(1 << 16)}, tmp_path / "model.safetensors")
    (header,) = read_checkpoint(tmp_path).tensors.values()
    os.truncate(header.file, 1 << 12)
    with pytest.raises(BrokenCheckpointError, match="ended inside tensor"):
        finite._is_finite(header)

"""The search for NaN and infinity, over element types, places and names."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from finetune_trainer.weights import finite
from finetune_trainer.weights.finite import first_not_finite


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

"""Values from files, however many reads they take. That models compute with them is in test_streaming.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from finetune_trainer.verify import stored_weights
from finetune_trainer.verify.stored_weights import StoredWeights
from finetune_trainer.weights.errors import BrokenCheckpointError
from tests.unit.finetune_trainer.merge import tiny

PATH = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose tensors take many blocks where their values are converted."""
    monkeypatch.setattr(stored_weights, "BLOCK_BYTES", 1000)
    return tiny.save_base(tmp_path / "base", tiny.llama(), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_are_those_of_the_file(base: Path, dtype: torch.dtype) -> None:
    stored, weights = load_file(base / "model.safetensors"), StoredWeights(base)
    for path, values in stored.items():
        assert torch.equal(weights.whole(path, dtype), values.to(dtype))


@pytest.mark.parametrize("missing", [1, 500, 1500])
def test_a_file_that_is_cut_short_is_an_error(base: Path, missing: int) -> None:
    weights = StoredWeights(base)
    header = weights._parameter(PATH).parts[0].header
    os.truncate(header.file, header.offset + header.num_bytes - missing)
    for dtype in (torch.bfloat16, torch.float32):
        with pytest.raises(BrokenCheckpointError, match=f"ended inside tensor {PATH}"):
            weights.whole(PATH, dtype)

"""Merging where the model was trained: a sharded model has no whole weights to add to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pitfalls.cases import Case, prepared
from tests.pitfalls.manifests import findings
from tests.pitfalls.ranks import run_ranks

NOT_ALLOCATED = "but its data is not allocated yet"
OTHER_SIZE = "size"


def merge_in_place(rank: int, case: Case, base: str) -> dict[str, Any]:
    """What a script does that merges right after its training."""
    import torch

    model = prepared(case, Path(base))
    tokens = torch.arange(32).reshape(2, 16) % 64
    model(input_ids=tokens, labels=tokens).loss.backward()
    inner = model.module if case.version == 1 else model
    merged = inner.merge_and_unload()
    return {"parameters": sum(parameter.numel() for parameter in merged.parameters())}


@pytest.mark.parametrize(("use_orig_params", "text"), [(False, NOT_ALLOCATED), (True, OTHER_SIZE)])
def test_a_sharded_model_cannot_be_merged(base: Path, tmp_path: Path, use_orig_params: bool, text: str) -> None:
    case = Case(policy="transformer" if use_orig_params else "peft", use_orig_params=use_orig_params)
    results = run_ranks(merge_in_place, case, str(base), directory=tmp_path)
    errors = [result.error for result in results if result.failed]
    assert errors
    assert all("RuntimeError" in error and text in error for error in errors), errors
    assert "merge-while-sharded" in findings({"version": 1}, merge_base="Trained")


def test_one_process_with_whole_weights_merges(base: Path, tmp_path: Path) -> None:
    from tests.pitfalls.cases import adapted, load_base

    merged = adapted(Case(), load_base(Case(), base)).merge_and_unload()
    assert not any("lora" in name for name, _ in merged.named_parameters())
    assert "merge-while-sharded" not in findings({"version": 1})

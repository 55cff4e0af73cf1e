"""Merging where the model was trained: a sharded model has no whole weights to add to."""

from __future__ import annotations

import pytest

from tests.pitfalls.lab.case import Case
from tests.pitfalls.lab.expect import fails
from tests.pitfalls.lab.observe import observe
from tests.pitfalls.manifests import findings

RULE = "merge-while-sharded"


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (Case(merge="sharded", until="merge"), "but its data is not allocated yet"),
        (Case(policy="transformer", use_orig_params=True, merge="sharded", until="merge"), "size"),
    ],
    ids=["flat", "original"],
)
def test_a_sharded_model_cannot_be_merged_under_fsdp_1(case: Case, text: str) -> None:
    fails(case, "merge", "RuntimeError", text)
    assert RULE in findings({"version": 1}, merge_base="Trained")


def test_fsdp_2_merges_in_place_on_cpu_ranks() -> None:
    """Contrary to PEFT's documentation; a rule refuses it all the same, because a GPU would be held for it."""
    found = observe(Case(version=2, merge="sharded", until="merge"))
    assert not found.failed
    assert found.merge_error is not None
    assert found.merge_error < 1e-5
    assert RULE in findings({"version": 2}, merge_base="Trained")


def test_one_process_with_whole_weights_merges() -> None:
    found = observe(Case(version=2, until="merge"))
    assert found.merge_error is not None
    assert found.merge_effect is not None
    assert found.merge_error < 1e-5 < found.merge_effect
    assert RULE not in findings({"version": 1})


def test_a_16_bit_merge_rounds() -> None:
    exact = observe(Case(version=2, until="merge"))
    rounded = observe(Case(version=2, dtype="bfloat16", until="merge"))
    assert exact.merge_error is not None
    assert rounded.merge_error is not None
    assert exact.merge_error < 1e-5
    assert 1e-4 < rounded.merge_error < 0.1

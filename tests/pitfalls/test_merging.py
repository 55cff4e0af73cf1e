"""Merging where the model was trained: a sharded model has no whole weights to add to."""

import pytest

from finetune_job.api.enumerations import MergeBase
from tests.pitfalls.lab.case import Case
from tests.pitfalls.lab.expect import fails
from tests.pitfalls.lab.observe import observe
from tests.pitfalls.manifests import findings, plans

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
    """Apart, as the fix has it, one process merges what was saved of the same training."""
    fails(case, "merge", "RuntimeError", text)
    wrong, right = plans(RULE, {"parallelism.fsdp.version": 1, "parallelism.processesPerNode": 2, "merge.base": "Trained"})
    assert (wrong.merge.base, right.merge.base) == (MergeBase.TRAINED, MergeBase.ORIGINAL)
    apart = observe(Case(version=2, until="merge"))
    assert apart.merge_error is not None
    assert apart.merge_error < 1e-5


def test_fsdp_2_merges_in_place_on_cpu_ranks() -> None:
    """Contrary to PEFT's documentation; a rule refuses it all the same, because a GPU would be held for it."""
    found = observe(Case(version=2, merge="sharded", until="merge"))
    assert not found.failed
    assert found.merge_error is not None
    assert found.merge_error < 1e-5
    assert RULE in findings({"version": 2}, merge_base="Trained")


def test_a_16_bit_merge_rounds() -> None:
    exact = observe(Case(version=2, until="merge"))
    rounded = observe(Case(version=2, dtype="bfloat16", until="merge"))
    assert exact.merge_error is not None
    assert rounded.merge_error is not None
    assert exact.merge_error < 1e-5
    assert 1e-4 < rounded.merge_error < 0.1

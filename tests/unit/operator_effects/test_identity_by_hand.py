"""Whose name counts, and what does not pile up."""

from __future__ import annotations

import pytest

from finetune_operator.cluster.projection import batch_job_view
from finetune_operator.keyed_heap import KeyedHeap
from tests.unit.operator_effects import objects


@pytest.mark.parametrize(
    ("name", "is_ours"), [("tune-train-0", True), ("tune-train-0-copy", False), ("tune-train-x", False), ("tune-evaluate-0", False)]
)
def test_the_whole_name_of_a_job_says_what_it_is_for(name: str, is_ours: bool) -> None:
    document = objects.batch_job()
    document["metadata"]["name"] = name
    assert (batch_job_view(document) is not None) is is_ours


def test_outdated_entries_of_a_heap_do_not_pile_up() -> None:
    heap: KeyedHeap[str] = KeyedHeap()
    for moment in range(10_000):
        heap.put("one", float(-moment))
    assert heap.num_entries < 100
    assert heap.first() == (-9999.0, "one")

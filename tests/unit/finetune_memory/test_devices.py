"""Devices by the names that drivers and node labels give them."""

import pytest

from finetune_memory.devices import device_of
from tests.support.cases import table


@pytest.mark.parametrize(("name", "flops", "memory"), table(__file__, "test_peaks_are_found_by_whole_words"))
def test_peaks_are_found_by_whole_words(name: str, flops: float | None, memory: float | None) -> None:
    found = device_of(name)
    assert (found and found.flops, found and found.memory) == (flops, memory)


@pytest.mark.parametrize(("name", "gib"), table(__file__, "test_the_memory_is_what_programs_can_have_of_it"))
def test_the_memory_is_what_programs_can_have_of_it(name: str, gib: int) -> None:
    """As torch says when it runs out: 139.80 GiB of an H200 (bench/results/gpu/out-of-memory.json), 79.25 of an A100 of 80 GB,
    44.40 of an L40, 22.03 of an L4, 21.99 of an A10. The smallest, if several sizes bear the name.
    """
    found = device_of(name)
    assert found is not None
    assert found.capacity == gib * 1024**3

"""Devices by the names that drivers and node labels give them."""

from __future__ import annotations

import pytest

from finetune_memory.devices import device_of


@pytest.mark.parametrize(
    ("name", "flops", "memory"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12, 3.35e12),
        ("NVIDIA-H100-80GB-HBM3", 989e12, 3.35e12),
        ("H100", 989e12, 3.35e12),
        ("NVIDIA H100 PCIe", 756e12, 2.0e12),
        ("NVIDIA H100 NVL", 835e12, 3.9e12),
        ("NVIDIA H200", 989e12, 4.8e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 2.039e12),
        ("NVIDIA-A100-SXM4-40GB", 312e12, 1.555e12),
        ("NVIDIA A100 80GB PCIe", 312e12, 1.935e12),
        ("NVIDIA A100-PCIE-40GB", 312e12, 1.555e12),
        ("NVIDIA A10G", 70e12, 600e9),
        ("NVIDIA A10", 125e12, 600e9),
        ("NVIDIA L40S", 362e12, 864e9),
        ("NVIDIA L4", 121e12, 300e9),
        ("NVIDIA B200", 2.25e15, 7.7e12),
        ("NVIDIA GB200", 2.5e15, 8e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 1.008e12),
        ("AMD Instinct MI300X", 1307.4e12, 5.3e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None),
        ("NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", None, None),
        ("NVIDIA-L4-SHARED", None, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
        ("Tesla V100-SXM2-16GB", None, None),
        ("NVIDIA H1000", None, None),
    ],
)
def test_peaks_are_found_by_whole_words(name: str, flops: float | None, memory: float | None) -> None:
    found = device_of(name)
    assert (found and found.flops, found and found.memory) == (flops, memory)


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("H100", 79),
        ("NVIDIA H100 NVL", 93),
        ("NVIDIA H200", 139),
        ("A100", 39),
        ("NVIDIA A100-SXM4-80GB", 79),
        ("NVIDIA A100 80GB PCIe", 79),
        ("NVIDIA-A100-SXM4-40GB", 39),
        ("NVIDIA A10", 21),
        ("NVIDIA L4", 22),
        ("NVIDIA L40S", 44),
        ("NVIDIA GeForce RTX 4090", 23),
        ("NVIDIA B200", 178),
        ("AMD Instinct MI300X", 191),
    ],
)
def test_the_memory_is_what_programs_can_have_of_it(name: str, gib: int) -> None:
    """As torch says when it runs out: 139.80 GiB of an H200 (bench/results/gpu/out-of-memory.json), 79.25 of an A100 of 80 GB,
    44.40 of an L40, 22.03 of an L4, 21.99 of an A10. The smallest, if several sizes bear the name.
    """
    found = device_of(name)
    assert found is not None
    assert found.capacity == gib * 1024**3

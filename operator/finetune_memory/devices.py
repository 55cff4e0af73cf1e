"""What devices can do by their data sheets, and which part of it training reaches.

The peaks are published. With the parts the calculation meets what steps took on one H200 (docs/explanation/memory.md).
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """Published peaks."""

    name: str
    """As it was given."""
    flops: float
    """Operations per second: dense bfloat16 products with float32 sums."""
    memory: float
    """Bytes per second."""
    link: float
    """Bytes per second, in one direction, to the other devices of a machine."""
    capacity: int
    """Bytes of memory that programs can have."""


_DEVICES: tuple[tuple[re.Pattern[str], float, float, float, int], ...] = (
    # NVIDIA data sheets give some figures with structured sparsity only; those are halved. Cards without NVLink send over PCIe.
    (re.compile(r"\bGB200\b"), 2.5e15, 8e12, 900e9, 184),
    (re.compile(r"\bB200\b"), 2.25e15, 7.7e12, 900e9, 178),
    (re.compile(r"\bH200 NVL\b"), 835e12, 4.8e12, 64e9, 139),
    (re.compile(r"\bH200\b"), 989e12, 4.8e12, 450e9, 139),
    (re.compile(r"\bH100 PCIe\b"), 756e12, 2.0e12, 64e9, 79),
    (re.compile(r"\bH100 NVL\b"), 835e12, 3.9e12, 64e9, 93),
    (re.compile(r"\bH800\b"), 989e12, 3.35e12, 200e9, 79),
    (re.compile(r"\bH100\b"), 989e12, 3.35e12, 450e9, 79),
    (re.compile(r"\bH20\b"), 148e12, 4.0e12, 450e9, 95),
    (re.compile(r"\bA(100|800) PCIE 40GB\b"), 312e12, 1.555e12, 32e9, 39),
    (re.compile(r"\bA(100|800) (80GB PCIe|PCIE 80GB)\b"), 312e12, 1.935e12, 32e9, 79),
    (re.compile(r"\bA800.* 80GB\b"), 312e12, 2.039e12, 200e9, 79),
    (re.compile(r"\bA100.* 80GB\b"), 312e12, 2.039e12, 300e9, 79),
    (re.compile(r"\bA800\b"), 312e12, 1.555e12, 200e9, 39),
    (re.compile(r"\bA100\b"), 312e12, 1.555e12, 300e9, 39),
    (re.compile(r"\bA40\b"), 149.7e12, 696e9, 32e9, 44),
    (re.compile(r"\bA30\b"), 165e12, 933e9, 32e9, 23),
    (re.compile(r"\bA10G\b"), 70e12, 600e9, 32e9, 22),
    (re.compile(r"\bA10\b"), 125e12, 600e9, 32e9, 21),
    (re.compile(r"\bL40S\b"), 362e12, 864e9, 32e9, 44),
    (re.compile(r"\bL40\b"), 181e12, 864e9, 32e9, 44),
    (re.compile(r"\bL4\b"), 121e12, 300e9, 32e9, 22),
    (re.compile(r"\bRTX A6000\b"), 154.8e12, 768e9, 32e9, 47),
    (re.compile(r"\bRTX 5090\b"), 209.5e12, 1.792e12, 64e9, 31),
    (re.compile(r"\bRTX 4090\b"), 165.2e12, 1.008e12, 32e9, 23),
    (re.compile(r"\bRTX 3090\b"), 71e12, 936e9, 32e9, 23),
    # AMD data sheets.
    (re.compile(r"\bMI300X\b"), 1307.4e12, 5.3e12, 448e9, 191),
    (re.compile(r"\bMI325X\b"), 1307.4e12, 6.0e12, 448e9, 255),
)
"""Words in a device's name -> operations, bytes of its memory and bytes of its link per second, and GiB of its memory; the first
that fits. The memory is what programs can have, in whole GiB, rounded down: about half a GiB less than the driver
shows as the total; of a name that several sizes bear, the smallest."""


@dataclass(frozen=True)
class Calibration:
    """Which share of a peak training reaches."""

    flops: float
    """Share of the operations, in large matrix products."""
    attention: float
    """Share of the operations, in fused attention, forward and backward together."""
    memory: float
    """Share of the memory's bytes, in kernels that compute little with what they read and write."""
    link: float
    """Share of the link's bytes, in collectives."""


ASSUMED = Calibration(flops=0.7, attention=0.4, memory=0.55, link=0.7)
"""With these an 8B LoRA on an H200 is calculated within 5 % of what it took, compiled or not (bench/results/gpu/speed.json).

The share of attention is assumed still: torch 2.11 took flash attention there, at about half of it, and later versions take
cuDNN's kernel where they can. The share of links was not measured.
"""
_KERNELS_OF_H200 = Calibration(flops=0.841, attention=0.478, memory=0.871, link=0.7)
"""What kernels alone reached on that H200 (bench/results/gpu/calibration.json), which is more than they reach in training."""
NETWORK_BYTES_PER_SECOND = 25e9
"""Assumed between machines, for each device: 200 Gbit/s."""


def calibrated(flops: float, attention: float, memory: float) -> Calibration:
    """What training reaches on a device on which kernels alone reach these shares, if it loses there as much as on the H200."""
    kernels = _KERNELS_OF_H200
    return Calibration(
        flops=ASSUMED.flops * flops / kernels.flops,
        attention=ASSUMED.attention * attention / kernels.attention,
        memory=ASSUMED.memory * memory / kernels.memory,
        link=ASSUMED.link,
    )


def device_of(name: str) -> Device | None:
    """By the name that its driver or its node's label gives it; None for one that is not listed.

    None for a part of a device and a shared one, too, and for those of notebooks, which bear the same names.
    """
    words = name.replace("-", " ").replace("_", " ")
    if re.search(r"\b(MIG|Laptop|SHARED)\b", words):
        return None
    for pattern, flops, memory, link, gibibytes in _DEVICES:
        if pattern.search(words):
            return Device(name, flops, memory, link, gibibytes << 30)
    return None

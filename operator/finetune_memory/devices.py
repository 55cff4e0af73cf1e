"""Peak rates of devices from their data sheets, and the shares of these rates that training reaches.

With these shares the calculation agrees with the step times measured on one H200 (docs/explanation/memory.md).
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Device:
    """The published peak rates of a device."""

    name: str
    """The name by which the device was looked up."""
    flops: float
    """Operations per second: dense bfloat16 products with float32 accumulation."""
    memory: float
    """Memory bandwidth in bytes per second."""
    link: float
    """Bandwidth to the other devices of a machine, in bytes per second and direction."""
    capacity: int
    """Bytes of memory that programs can use."""


_TABLES = tomllib.loads(files("finetune_memory").joinpath("devices.toml").read_text())
_DEVICES = _TABLES["devices"]


@dataclass(frozen=True)
class Calibration:
    """The shares of a device's peak rates that training reaches."""

    flops: float
    """Share of the peak operations per second that large matrix products reach."""
    attention: float
    """Share of the peak operations per second that fused attention reaches, forward and backward together."""
    memory: float
    """Share of the memory bandwidth that memory-bound kernels reach."""
    link: float
    """Share of the link's bandwidth that collectives reach."""


ASSUMED = Calibration(flops=0.7, attention=0.4, memory=0.55, link=0.7)
"""These shares put an 8B LoRA on an H200 within 5 % of its measured time, compiled or not (bench/results/gpu/speed.json).

The attention share is an assumption: on the H200, torch 2.11 used flash attention and reached about half of this share; later
versions use cuDNN's kernel where they can. The link share was not measured.
"""
NETWORK_BYTES_PER_SECOND = 25e9
"""Assumed bandwidth between machines for each device: 200 Gbit/s."""


_PART = re.compile(r"\b(MIG|Laptop|SHARED)\b|\b\d+g\.\d+gb|\b\d+[QCBA](ME)?$", re.IGNORECASE)
"""Matches words that mark a part of a device: MIG profiles (1g.10gb), vGPU types (A10-24Q, A100-1-5C), shared devices."""


def has_bfloat16(name: str) -> bool:
    """Whether the matrix units of a listed device support bfloat16, and not only float16."""
    return not any(re.search(pattern, _words(name), re.IGNORECASE) for pattern in _TABLES["without_bfloat16"])


def known_devices() -> list[str]:
    """Return the short names of the listed devices, without variants of a name that differ in memory or interconnect."""
    names = (pattern.replace(r"\b", "").replace(" ?", " ") for pattern, *_ in _DEVICES)
    return [name for name in names if re.fullmatch(r"[A-Za-z0-9 ]+", name)]


def device_of(name: str) -> Device | None:
    """Look up a device by the name that its driver or its node's label gives; None if it is not listed.

    Parts of a device, shared devices and laptop GPUs are not found, although their names contain a listed name.
    """
    words = _words(name)
    if _PART.search(words):
        return None
    for pattern, flops, memory, link, gibibytes in _DEVICES:
        if re.search(pattern, words, re.IGNORECASE):
            return Device(name, flops, memory, link, gibibytes << 30)
    return None


def _words(name: str) -> str:
    return name.replace("-", " ").replace("_", " ")

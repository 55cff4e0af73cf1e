"""Tests a rank's device for a second before training starts: its memory, matrix products, and a sum over all ranks.

A device that computes wrong results trains a wrong model, and a slow one delays all others. The test's results are exact in any
order and precision of summation, so they are compared bit by bit. The device's speeds are also measured.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from finetune_trainer.errors import BROKEN_DEVICE_HINT, DeviceFaultError
from finetune_trainer.ranks.gang import Gang

log = logging.getLogger(__name__)

SIZE = {"cuda": 8192, "cpu": 256}
"""Number of rows and of columns of the multiplied matrices: enough to reach peak speed, at which an L4 takes 9 milliseconds."""
BYTES = {"cuda": 4 << 30, "cpu": 1 << 20}
"""Maximum number of bytes to test; fewer are tested if little memory is free."""
ROUNDS = 5
PATTERNS = (0x55, 0xAA)
"""Two bytes: each bit is 0 in one of them and 1 in the other."""
SLOW_SHARE = 0.8
"""A device below this share of the median speed is too hot, shared or broken; normal differences are smaller."""
_SEED = 20_240_601
_NONZERO_SHARE = 0.125
"""Share of entries that are 1; an equal share is -1. Sums of 8,192 products then stay far below 256, up to which bfloat16
represents integers exactly.
"""


@dataclass(frozen=True)
class DeviceFigures:
    """Speeds measured on a device."""

    flops: float
    """Operations per second in a bfloat16 matrix product."""
    memory: float
    """Bytes read and written per second in a copy."""
    slowest_share: float = 1.0
    """Operations per second of the slowest rank's device, divided by the median over all ranks."""


def check_device(gang: Gang) -> DeviceFigures:
    """Test this rank's device. All ranks call this together, before anything else is on the device. Raises DeviceFaultError."""
    figures = DeviceFigures(flops=_products(gang.device), memory=_memory(gang.device))
    _sum_over_ranks(gang)
    if gang.device.type == "cuda":
        # Free the tested memory for training, and leave it out of measured peaks.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(gang.device)
    return replace(figures, slowest_share=_slowest_share(gang.gather(figures.flops, float), logs=gang.is_first))


def _slowest_share(flops: Sequence[float], *, logs: bool) -> float:
    """Return the slowest rank's speed divided by the median. flops: speeds by rank. logs: whether to log a slow rank.

    In a training step, all ranks wait inside collectives for the slowest one, so a slow rank would not be noticed there.
    """
    share = min(flops) / statistics.median(flops)
    if logs and share < SLOW_SHARE:
        rank = min(range(len(flops)), key=flops.__getitem__)
        log.warning("the device of rank %d reaches %.0f %% of the median rank's speed: all others wait for it", rank, 100 * share)
    return share


def _products(device: torch.device) -> float:
    size = SIZE[device.type]
    generator = torch.Generator(device).manual_seed(_SEED)
    drawn = torch.rand((2, size, size), generator=generator, device=device)
    signs = (drawn < _NONZERO_SHARE).to(torch.bfloat16) - (drawn > 1 - _NONZERO_SHARE).to(torch.bfloat16)
    first, second = signs
    # (first @ second) @ vector equals first @ (second @ vector), which takes a thousandth of the operations.
    vector = torch.arange(size, dtype=torch.float64).remainder(7).to(device)
    wanted = first.double() @ (second.double() @ vector)
    seconds = _shortest(lambda: torch.mm(first, second), device)
    for _ in range(ROUNDS):
        wrong = int((torch.mm(first, second).double() @ vector != wanted).sum())
        if wrong:
            raise DeviceFaultError(f"{_name(device)}: {wrong} of {size} rows of a matrix product are wrong", BROKEN_DEVICE_HINT)
    return 2 * size**3 / seconds


def _memory(device: torch.device) -> float:
    count = BYTES[device.type]
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        count = min(count, free // 4)
    source = torch.empty(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    for pattern in PATTERNS:
        source.fill_(pattern)
        target.copy_(source)
        wrong = int((target != pattern).sum())
        if wrong:
            raise DeviceFaultError(
                f"{_name(device)}: {wrong} of {count} bytes of its memory do not hold what was written", BROKEN_DEVICE_HINT
            )
    return 2 * count / _shortest(lambda: target.copy_(source), device)


def _sum_over_ranks(gang: Gang) -> None:
    """Check a sum of integers over all ranks, which uses the same links as gradients."""
    if gang.world_size == 1:
        return
    length = 1 << 20 if gang.device.type == "cuda" else 1 << 10
    places = torch.arange(length, device=gang.device, dtype=torch.float32).remainder(64)
    mine = places + gang.rank
    dist.all_reduce(mine)
    wanted = gang.world_size * places + gang.world_size * (gang.world_size - 1) / 2
    wrong = int((mine != wanted).sum())
    if wrong:
        raise DeviceFaultError(
            f"{_name(gang.device)}: {wrong} of {length} values of a sum over {gang.world_size} ranks are wrong",
            BROKEN_DEVICE_HINT,
        )


def _shortest(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that the fastest of several rounds of `work` takes."""
    seconds = []
    for _ in range(ROUNDS):
        _wait(device)
        began = time.perf_counter()
        work()
        _wait(device)
        seconds.append(time.perf_counter() - began)
    return max(min(seconds), 1e-9)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _name(device: torch.device) -> str:
    """Name of the device, with the UUID that `nvidia-smi -L` lists."""
    if device.type != "cuda":
        return "the processor"
    facts = torch.cuda.get_device_properties(device)
    return f"GPU {device.index} ({facts.name}, {getattr(facts, 'uuid', 'no serial number')})"

"""What the tiers of `make gpu-check` run on, and what a tier is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Rows = list[dict[str, object]]
TOY_SECONDS = 600
"""Of any tier at toy size: a busy machine with two processors is slow, and costs little."""


@dataclass(frozen=True)
class Scale:
    """What there is to run on."""

    device: torch.device
    gpus: int
    is_quick: bool = False
    """Of each tier only what is cheapest."""

    @classmethod
    def of_this_machine(cls, *, is_quick: bool = False) -> Scale:
        has_gpu = torch.cuda.is_available()
        return cls(torch.device("cuda" if has_gpu else "cpu"), torch.cuda.device_count() if has_gpu else 0, is_quick)

    @property
    def is_toy(self) -> bool:
        return self.device.type == "cpu"

    @property
    def name(self) -> str:
        return "CPU, toy size" if self.is_toy else f"{self.gpus} x {torch.cuda.get_device_name()}"

    @property
    def ranks(self) -> int:
        """Of a gang: one for each device, because NCCL takes no two on one."""
        return 2 if self.is_toy else min(self.gpus, 2)

    def limit(self, tier: Tier) -> int:
        """Seconds that a tier may take."""
        return TOY_SECONDS if self.is_toy else tier.seconds


@dataclass(frozen=True)
class Tier:
    """Something to be shown."""

    run: Callable[[Scale, Rows], str]
    """Adds rows of figures, and returns what is wrong."""
    seconds: int
    """That it may take on a device."""
    shows: str
    """What a device shows that a CPU cannot."""

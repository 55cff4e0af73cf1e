"""Stateless randomness: each forward pass is seeded by where it stands, so a resumed run draws what the first would have drawn."""

from __future__ import annotations

import hashlib
import random

import torch


def seed_of(seed: int, step: int, micro_step: int, rank: int) -> int:
    """A seed of 63 bits; neighbouring arguments give unrelated seeds."""
    text = f"{seed}/{step}/{micro_step}/{rank}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def seed_forward_pass(seed: int, step: int, micro_step: int, rank: int) -> None:
    """Seed what a forward pass may draw from: torch on all devices, and Python."""
    value = seed_of(seed, step, micro_step, rank)
    torch.manual_seed(value)
    random.seed(value)

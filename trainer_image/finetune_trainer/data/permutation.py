"""Computes the order of the training sequences: which sequence is at a given place of an epoch.

A counter-based permutation needs no state: any place of any epoch is computed in constant time. So a resumed run, or a run with a
different number of ranks, has the same order without replaying it. Called by the training loop, which maps step and rank to
places.
"""

from __future__ import annotations

from hashlib import blake2b

ROUNDS = 6
"""Feistel rounds. With a pseudorandom round function, four give a pseudorandom permutation (Luby and Rackoff, 1988)."""


def position(seed: int, epoch: int, index: int, n: int) -> int:
    """The sequence at place `index` of an epoch. For fixed seed, epoch and n, this is a bijection of 0..n-1.

    It is a balanced Feistel network over the smallest even number of bits that holds n-1. Results outside 0..n-1 are fed in again
    (cycle walking, Black and Rogaway, 2002), on average fewer than four times. Raises ValueError if the index is not in 0..n-1,
    or if seed or epoch is negative.
    """
    if not 0 <= index < n:
        raise ValueError(f"index {index} is not in 0..{n - 1}")
    if seed < 0 or epoch < 0:
        raise ValueError(f"seed ({seed}) and epoch ({epoch}) must not be negative")
    half_bits = max((n - 1).bit_length() + 1, 2) // 2
    value = index
    while True:
        value = _permuted(seed, epoch, value, half_bits)
        if value < n:
            return value


def _permuted(seed: int, epoch: int, value: int, half_bits: int) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for number in range(ROUNDS):
        left, right = right, left ^ (_keyed_hash(seed, epoch, number, right) & mask)
    return left << half_bits | right


def _keyed_hash(seed: int, epoch: int, number: int, half: int) -> int:
    """64 bits that depend on all four arguments; blake2b gives the same bits on every machine and Python version."""
    text = f"{seed}:{epoch}:{number}:{half}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")

"""Sizes of parts. The real store is in tests/integration."""

from __future__ import annotations

import pytest

from finetune_trainer.publish.s3 import part_size

MIB = 1 << 20


@pytest.mark.parametrize(
    ("file", "part"),
    [
        (1, 16 * MIB),
        (160_000 * MIB, 16 * MIB),
        # One byte more than 10,000 parts of 16 MiB hold.
        (160_000 * MIB + 1, 16 * MIB + 1),
        (168_000_000_000, 16_800_000),
        (168_000_000_001, 16_800_001),
        (5_000_000_000_000, 500_000_000),
        (4_999_999_999_993, 500_000_000),
    ],
)
def test_a_part_is_as_small_as_ten_thousand_of_them_may_be(file, part):
    assert part_size(file, 16 * MIB) == part

"""Rounding in numbers that were computed by hand."""

import torch

from finetune_trainer.weights.rounding import all_finite, round_into


def test_values_are_rounded_once_into_the_type_in_between_and_once_into_the_result():
    # 1 + 2^-8 + 2^-17: bfloat16 has steps of 2^-7 at 1, so straight it is above the middle and rounds up; float16 has steps of
    # 2^-10 and takes off 2^-17 first, and the middle then goes to the even neighbour, 1.
    value = torch.tensor([1 + 2.0**-8 + 2.0**-17], dtype=torch.float32)
    for compute, expected in ((torch.float32, 1 + 2.0**-7), (torch.bfloat16, 1 + 2.0**-7), (torch.float16, 1.0)):
        out = torch.zeros(1, dtype=torch.bfloat16)
        round_into(value, compute, out)
        assert out.item() == expected, compute


def test_what_is_not_finite_is_seen_and_a_sum_that_overflows_is_not_taken_for_it():
    assert all_finite(torch.ones(3))
    assert not all_finite(torch.tensor([1.0, float("nan")]))
    assert not all_finite(torch.tensor([1.0, float("inf")], dtype=torch.bfloat16))
    assert all_finite(torch.full((4,), 3e38))

"""Which differences of gradients rounding explains."""

import pytest
import torch

from finetune_trainer.rehearsal.comparison import differing_gradients, tolerance_of

WANTED = {"large": torch.full((4, 4), 1.0), "small": torch.full((4,), 1e-3)}


@pytest.mark.parametrize(
    ("dtype", "name", "factor", "is_seen"),
    [
        (torch.float32, "large", 1.001, False),
        (torch.float32, "large", 1.01, True),
        (torch.float32, "small", 0.5, True),
        (torch.bfloat16, "large", 1.05, False),
        (torch.bfloat16, "large", 0.5, True),
        (torch.bfloat16, "small", 0.5, False),
    ],
)
def test_a_share_of_a_gradient_is_seen_from_the_bound_on(dtype: torch.dtype, name: str, factor: float, is_seen: bool) -> None:
    found = {**WANTED, name: WANTED[name] * factor}
    sentences = list(differing_gradients(found, WANTED, tolerance_of(dtype)))
    assert bool(sentences) == is_seen, sentences
    assert all(name in sentence for sentence in sentences)


def test_what_rounding_does_to_one_process_is_allowed_to_ranks() -> None:
    found = {**WANTED, "large": WANTED["large"] * 1.3}
    tolerance = tolerance_of(torch.bfloat16)
    assert list(differing_gradients(found, WANTED, tolerance, {**WANTED, "large": WANTED["large"] * 0.99}))
    assert not list(differing_gradients(found, WANTED, tolerance, {**WANTED, "large": WANTED["large"] * 0.9}))


def test_a_tensor_too_few_and_one_that_is_no_number_are_seen() -> None:
    tolerance = tolerance_of(torch.bfloat16)
    assert list(differing_gradients({"large": WANTED["large"]}, WANTED, tolerance)) == ["ranks train 1 tensors, one process 2"]
    assert list(differing_gradients({**WANTED, "large": torch.full((4, 4), torch.nan)}, WANTED, tolerance))

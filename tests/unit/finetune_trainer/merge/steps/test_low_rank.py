"""The part of factors of all experts that belongs to one stored matrix."""

import pytest
import torch

from finetune_trainer.merge.changes import Orientation
from finetune_trainer.merge.steps import low_rank
from finetune_trainer.weights import errors
from finetune_trainer.weights.stored import ExpertPart


@pytest.mark.parametrize("orientation", [Orientation.LINEAR, Orientation.CONV1D])
def test_part_of_factors_is_the_stored_parts_share_of_the_product(orientation: Orientation) -> None:
    torch.manual_seed(0)
    # Smaller products torch computes in a loop of its own if there are several, with other bits on some processors.
    num_experts, rank, num_in, num_out = 3, 4, 10, 16
    a, b = torch.randn(num_experts * rank, num_in), torch.randn(num_out, rank * num_experts)
    whole = torch.einsum("ore,eri->eoi", b.view(num_out, rank, num_experts), a.view(num_experts, rank, num_in))
    if orientation is not Orientation.LINEAR:
        whole = whole.transpose(1, 2)
    rows, num_columns = slice(1, 4), whole.shape[2]
    for expert in range(num_experts):
        part = ExpertPart(expert, num_experts, rows.start)
        of_a, of_b = low_rank.part_of_factors(a, b, part, orientation, (3, num_columns))
        product = of_b @ of_a if orientation is Orientation.LINEAR else (of_b @ of_a).T
        assert torch.allclose(product, whole[expert, rows])


def test_zeros_widen_the_rank_and_change_no_value() -> None:
    a, b = torch.randn(2, 5), torch.randn(4, 2)
    wide_a, wide_b = low_rank.part_of_factors(
        a, b, ExpertPart(0, 1, 0, zeros_before=2, zeros_after=4), Orientation.LINEAR, (4, 5)
    )
    assert (wide_a.shape, wide_b.shape) == ((8, 5), (4, 8))
    assert torch.allclose(wide_b @ wide_a, b @ a)


def test_machine_whose_single_products_differ_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    einsum = torch.einsum
    monkeypatch.setattr(torch, "einsum", lambda *operands: einsum(*operands).nextafter(torch.tensor(9e9)))
    with pytest.raises(errors.MergeError, match="3 experts, rank 2, 7 to 11 features"):
        low_rank.require_equal_products(torch.randn(6, 7), torch.randn(11, 6), 3)

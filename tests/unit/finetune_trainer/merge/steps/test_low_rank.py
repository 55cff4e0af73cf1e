"""Products in blocks have PEFT's bits, and the self-check notices a matrix library with other bits."""

from dataclasses import replace

import pytest
import torch

from finetune_trainer.merge.changes import Orientation
from finetune_trainer.merge.steps import low_rank
from finetune_trainer.merge.steps.low_rank import Add, Factors, LowRankStep, add_product, add_while_multiplying, is_exact
from finetune_trainer.merge.steps.step import Scratch, row_blocks
from finetune_trainer.weights import errors

ORIENTATIONS = [Orientation.LINEAR, Orientation.CONV1D]


def factors_of(orientation: Orientation, num_rows: int, scaling: float = 2.0) -> Factors:
    """Return factors for a weight that is stored as (num_rows, 48)."""
    torch.manual_seed(5)
    outs, ins = (num_rows, 48) if orientation is Orientation.LINEAR else (48, num_rows)
    return Factors(torch.randn(16, ins), torch.randn(outs, 16), None, scaling, orientation, rounds_product=False)


def merged(factors: Factors, base: torch.Tensor, compute: torch.dtype, written: torch.dtype) -> torch.Tensor:
    step, scratch, out = LowRankStep(factors, compute), Scratch(), torch.empty(base.shape, dtype=written)
    for start, stop in step.row_blocks(*base.shape):
        assert step.apply(base[start:stop], (start, stop), out[start:stop], scratch)
    return out


@pytest.mark.parametrize("num_rows", [200, 2000])
@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("real", [add_product, add_while_multiplying])
def test_the_self_check_sees_one_different_bit_in_any_block(real: Add, orientation: Orientation, num_rows: int) -> None:
    factors = factors_of(orientation, num_rows)
    assert is_exact(real, factors)
    blocks = row_blocks(num_rows, 48)
    assert len(blocks) == (7 if num_rows == 2000 else 1)
    for wrong in blocks:

        def add(
            given: Factors, start: int, stop: int, weight: torch.Tensor, scratch: Scratch, wrong: tuple[int, int] = wrong
        ) -> None:
            real(given, start, stop, weight, scratch)
            if (start, stop) == wrong:
                weight.view(torch.int32)[-1, 0] ^= 1

        assert not is_exact(add, factors)


def test_an_adapter_of_zeros_hides_no_kernel() -> None:
    factors = factors_of(Orientation.LINEAR, 2000)
    zeros = replace(factors, b=torch.zeros_like(factors.b.T).T)

    def add(given: Factors, start: int, stop: int, weight: torch.Tensor, scratch: Scratch) -> None:
        assert (given.b.stride(), given.b.shape) == (zeros.b.stride(), zeros.b.shape)
        weight += low_rank.scaled_product(given, start, stop, scratch) * 1.0000001

    assert not is_exact(add, zeros)


@pytest.mark.parametrize("num_columns", [1, 96, 8192, 28672, 1_000_000])
@pytest.mark.parametrize("num_rows", [1, 63, 64, 255, 256, 257, 511, 512, 513, 4097])
def test_blocks_cover_all_rows_and_none_is_small(num_rows: int, num_columns: int) -> None:
    blocks = row_blocks(num_rows, num_columns)
    assert [row for start, stop in blocks for row in (start, stop)][1:-1:2] == [start for start, _ in blocks][1:]
    assert (blocks[0][0], blocks[-1][1]) == (0, num_rows)
    sizes = [stop - start for start, stop in blocks]
    assert min(sizes) >= min(num_rows, 64)
    assert max(sizes) < 2 * 256


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("compute", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("stored", "written"), [(None, None), (torch.float32, None), (None, torch.float32)])
@pytest.mark.parametrize(("scaling", "in_one_pass"), [(2.0, True), (1.0, True), (64.0, True), (0.5, False), (1.7, False)])
def test_sums_have_pefts_bits_whichever_way_is_exact(
    orientation: Orientation,
    compute: torch.dtype,
    stored: torch.dtype | None,
    written: torch.dtype | None,
    scaling: float,
    in_one_pass: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    factors = factors_of(orientation, 700, scaling)
    base = torch.randn(700, 48).to(stored or compute)
    delta = (factors.b @ factors.a) * scaling
    expected = (base.to(compute) + (delta if orientation is Orientation.LINEAR else delta.T)).to(compute).to(written or compute)
    expected_ways = [add_while_multiplying if in_one_pass and compute is not torch.float64 else add_product, add_product, None]
    for exact, way in zip([{add_while_multiplying, add_product}, {add_product}, set()], expected_ways, strict=True):
        monkeypatch.setattr(low_rank, "_exact", {})
        monkeypatch.setattr(low_rank, "is_exact", lambda add, _, exact=exact: add in exact)
        assert torch.equal(merged(factors, base, compute, written or compute), expected)
        assert list(low_rank._exact.values()) == [way]
        assert (LowRankStep(factors, compute).row_blocks(700, 48) == [(0, 700)]) is (way is None)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("scaling", [2.0, 1.7])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_a_sum_that_is_not_finite_is_reported(value: float, scaling: float, compute: torch.dtype) -> None:
    factors = factors_of(Orientation.LINEAR, 300, scaling)
    factors.b[123, 4] = value
    step, base = LowRankStep(factors, compute), torch.randn(300, 48).to(compute)
    assert [
        step.apply(base[start:stop], (start, stop), torch.empty_like(base[start:stop]), Scratch())
        for start, stop in [(0, 100), (100, 300)]
    ] == [True, False]


def test_a_machine_whose_single_products_differ_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    einsum = torch.einsum
    monkeypatch.setattr(torch, "einsum", lambda *operands: einsum(*operands).nextafter(torch.tensor(9e9)))
    with pytest.raises(errors.MergeError, match="3 experts, rank 2, 7 to 11 features"):
        low_rank.require_equal_products(torch.randn(6, 7), torch.randn(11, 6), 3)

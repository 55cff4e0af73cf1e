"""Products in blocks: what the self-check of this machine's matrix library sees, and sums in one pass with PEFT's bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from finetune_trainer.merge.changes import Orientation
from finetune_trainer.merge.steps import low_rank, products
from finetune_trainer.merge.steps.step import Scratch


@pytest.mark.parametrize(
    ("orientation", "real"),
    [
        (Orientation.LINEAR, products.product),
        (Orientation.CONV1D, products.product),
        (Orientation.CONV1D, products.turned_product),
        (Orientation.EMBEDDING, products.turned_product),
    ],
)
@pytest.mark.parametrize("num_rows", [200, 2000])
def test_the_self_check_sees_one_different_bit_in_any_block(orientation: Orientation, real: Any, num_rows: int) -> None:
    torch.manual_seed(3)
    b_rows, a_columns = (num_rows, 40) if orientation is Orientation.LINEAR else (40, num_rows)
    factors = products.Factors(torch.randn(4, a_columns), torch.randn(b_rows, 4), None, 2.0, orientation, rounds_product=False)
    assert products.blocks_are_exact(factors, real)
    blocks = products.row_blocks(num_rows, 40)
    assert len(blocks) == (7 if num_rows == 2000 else 1)
    for wrong in blocks:

        def product(given: products.Factors, start: int, stop: int, wrong: tuple[int, int] = wrong) -> torch.Tensor:
            result = real(given, start, stop).contiguous()
            if (start, stop) == wrong:
                result.view(torch.int32)[-1, -1] ^= 1
            return result

        assert not products.blocks_are_exact(factors, product)


@pytest.mark.parametrize("num_columns", [1, 96, 8192, 28672, 1_000_000])
@pytest.mark.parametrize("num_rows", [1, 63, 64, 255, 256, 257, 511, 512, 513, 4097])
def test_blocks_cover_all_rows_and_none_is_small(num_rows: int, num_columns: int) -> None:
    blocks = products.row_blocks(num_rows, num_columns)
    assert [row for start, stop in blocks for row in (start, stop)][1:-1:2] == [start for start, _ in blocks][1:]
    assert (blocks[0][0], blocks[-1][1]) == (0, num_rows)
    sizes = [stop - start for start, stop in blocks]
    assert min(sizes) >= min(num_rows, products.MIN_BLOCK_ROWS)
    assert max(sizes) < 2 * products.BLOCK_ROWS


def factors_of(orientation: Orientation, num_rows: int, scaling: float = 2.0) -> products.Factors:
    torch.manual_seed(5)
    outs, ins = (num_rows, 48) if orientation is Orientation.LINEAR else (48, num_rows)
    return products.Factors(torch.randn(16, ins), torch.randn(outs, 16), None, scaling, orientation, rounds_product=False)


@pytest.mark.parametrize("orientation", [Orientation.LINEAR, Orientation.CONV1D])
def test_one_different_bit_of_a_sum_is_seen_in_any_block(orientation: Orientation, monkeypatch: pytest.MonkeyPatch) -> None:
    factors, real = factors_of(orientation, 2000), products.add_product
    assert products.sums_are_exact(factors)
    for wrong in products.row_blocks(2000, 48):

        def add(given: products.Factors, start: int, stop: int, weight: torch.Tensor, wrong: tuple[int, int] = wrong) -> None:
            real(given, start, stop, weight)
            if (start, stop) == wrong:
                weight.view(torch.int32)[-1, 0] ^= 1

        monkeypatch.setattr(products, "add_product", add)
        assert not products.sums_are_exact(factors)


def test_an_adapter_of_zeros_hides_no_kernel() -> None:
    factors = factors_of(Orientation.LINEAR, 2000)
    zeros = replace(factors, b=torch.zeros_like(factors.b.T).T)

    def product(given: products.Factors, start: int, stop: int) -> torch.Tensor:
        return products.product(given, start, stop) * 1.0000001

    assert products.blocks_are_exact(zeros, product)
    probe = products.probe_of(zeros)
    assert (probe.b.stride(), probe.b.shape) == (zeros.b.stride(), zeros.b.shape)
    assert not products.blocks_are_exact(probe, product)


@pytest.mark.parametrize("orientation", [Orientation.LINEAR, Orientation.CONV1D])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("stored", "written"), [(None, None), (torch.float32, None), (None, torch.float32)])
@pytest.mark.parametrize(("scaling", "in_one_pass"), [(2.0, True), (1.0, True), (64.0, True), (0.5, False), (1.7, False)])
def test_sums_have_pefts_bits_in_one_pass_and_in_two(
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
    used: list[Any] = []

    def add(*given: Any) -> None:
        used.append(given)
        products.add_product(*given)

    monkeypatch.setattr(low_rank, "add_product", add)
    for exact in (True, False):
        used.clear()
        monkeypatch.setattr(low_rank, "_exact_sums", {})
        monkeypatch.setattr(low_rank, "sums_are_exact", lambda _, exact=exact: exact)
        out, step, scratch = torch.empty(700, 48, dtype=written or compute), low_rank.LowRankStep(factors, compute), Scratch()
        for start, stop in step.row_blocks(700, 48):
            assert step.apply(base[start:stop], (start, stop), out[start:stop], scratch)
        assert torch.equal(out, expected)
        assert bool(used) is (exact and in_one_pass)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_a_sum_in_one_pass_that_is_not_finite_is_told(value: float, compute: torch.dtype) -> None:
    factors = factors_of(Orientation.LINEAR, 300)
    factors.b[123, 4] = value
    step, base = low_rank.LowRankStep(factors, compute), torch.randn(300, 48).to(compute)
    assert step._adds_in_place()
    found = [
        step.apply(base[start:stop], (start, stop), torch.empty_like(base[start:stop]), Scratch())
        for start, stop in [(0, 100), (100, 300)]
    ]
    assert found == [True, False]

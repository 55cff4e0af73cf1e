"""The test of a device: what a right one passes, and that one wrong value is seen."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune_job.failures import FailureClass, Outcome
from finetune_trainer.errors import DeviceFaultError, classify
from finetune_trainer.ranks import device_test
from finetune_trainer.ranks.gang import Gang
from finetune_trainer.train import rank
from tests.support.tiny_model import run_context, tiny_spec

CPU = torch.device("cpu")
ALONE = Gang(0, 1, 0, CPU, None)


def test_a_right_device_passes_and_says_what_it_reaches() -> None:
    found = device_test.check_device(ALONE)
    assert found.flops > 1e6
    assert found.memory > 1e6


def test_the_values_of_a_product_are_whole_numbers_that_16_bits_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    # As many terms of a sum as on a GPU, which may keep its parts in 16 bits.
    largest: list[float] = []
    product = torch.mm

    def seen(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        found = product(first.float()[:64], second.float())
        largest.append(float(found.abs().max()))
        raise InterruptedError

    monkeypatch.setitem(device_test.SIZE, "cpu", 2048)
    monkeypatch.setattr(torch, "mm", seen)
    with pytest.raises(InterruptedError):
        device_test.check_device(ALONE)
    # Four times as many terms on a GPU: at most twice as large, by the root of their number.
    assert 20 < largest[0] < 128


def _one_more(original: Callable[..., torch.Tensor], *values: Any) -> torch.Tensor:
    found = original(*values)
    found[3, 5] += 1
    return found


def test_one_wrong_value_of_a_product_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "mm", partial(_one_more, torch.mm))
    with pytest.raises(DeviceFaultError, match="the processor: 1 of 256 rows of a matrix product are wrong") as told:
        device_test.check_device(ALONE)
    assert classify(told.value) == (FailureClass.DEVICE_FAULT, "cordon the node and test its device, for example with dcgmi diag")


def test_one_wrong_byte_of_memory_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = torch.Tensor.copy_

    def flipped(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        copy(self, source)
        self[7] ^= 4
        return self

    monkeypatch.setattr(torch.Tensor, "copy_", flipped)
    with pytest.raises(DeviceFaultError, match="1 of 1048576 bytes of its memory"):
        device_test._memory(CPU)


def test_ranks_compare_their_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    gang = Gang(1, 2, 0, CPU, None)

    def reduced(values: torch.Tensor, extra: int = 0) -> None:
        # Of rank 0 and of this one.
        values.add_(values - 1)
        values[9] += extra

    monkeypatch.setattr("torch.distributed.all_reduce", reduced)
    device_test._sum_over_ranks(gang)
    monkeypatch.setattr("torch.distributed.all_reduce", partial(reduced, extra=1))
    with pytest.raises(DeviceFaultError, match="1 of 1024 values of a sum over 2 ranks"):
        device_test._sum_over_ranks(gang)


@pytest.mark.parametrize("part", ["_products", "_memory", "_sum_over_ranks"])
def test_every_part_is_asked(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    def wrong(*_: Any) -> float:
        raise DeviceFaultError(f"wrong {part}")

    monkeypatch.setattr(device_test, part, wrong)
    with pytest.raises(DeviceFaultError, match=f"wrong {part}"):
        device_test.check_device(ALONE)


@pytest.mark.parametrize(("flops", "share", "said"), [([9.0, 10.0, 11.0], 0.9, ""), ([10.0, 10.0, 4.0, 12.0], 0.4, "rank 2")])
def test_a_slow_device_is_told_from_those_that_wait_for_it(
    flops: list[float], share: float, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert device_test._slowest_share(flops, logs=False) == pytest.approx(share)
    assert not caplog.records
    assert device_test._slowest_share(flops, logs=True) == pytest.approx(share)
    assert (said in caplog.text, len(caplog.records)) == (True, int(bool(said)))


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("CUDA error: uncorrectable ECC error encountered", FailureClass.DEVICE_FAULT),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", FailureClass.DEVICE_FAULT),
        ("CUDA error: an illegal memory access was encountered", FailureClass.INTERNAL),
    ],
)
def test_what_the_driver_says_of_a_broken_device_has_its_class(text: str, failure: FailureClass) -> None:
    assert classify(RuntimeError(text))[0] is failure


def test_a_rank_with_a_gpu_tests_it_before_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Gang) -> None:
        raise DeviceFaultError("GPU 0 is wrong")

    reports = {}
    for kind in ("cuda", "cpu"):
        monkeypatch.setattr(rank, "joined", lambda *_, kind=kind: nullcontext(Gang(0, 1, 0, torch.device(kind), None)))
        monkeypatch.setattr(rank, "check_device", broken)
        monkeypatch.setattr(rank, "train", lambda *_: {})
        context = run_context(tmp_path / kind, tiny_spec(parallelism={"processesPerNode": 1}))
        reports[kind] = rank.run_rank(context, rank=0, world_size=1, local_rank=0, node_rank=2, observe_port=0)
    assert (reports["cuda"].failure, reports["cuda"].node_rank) == (FailureClass.DEVICE_FAULT, 2)
    assert reports["cpu"].outcome is Outcome.SUCCEEDED

"""In an optimizer step the host waits for the device once.

On a CPU nobody waits, so what would be on a device is followed: the model, what `to_device` returns, and all that is computed
from them. Asking for a value of that is a wait.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from finetune_job.api.inputs import Attention
from finetune_trainer.data import batches as data_batches
from finetune_trainer.data.batches import PreparedSplit
from finetune_trainer.model import sharded, variable_length
from finetune_trainer.objective import next_token
from finetune_trainer.objective.next_token import NextToken
from finetune_trainer.ranks.gang import Gang
from finetune_trainer.train.optimizers import build_optimizer
from finetune_trainer.train.step import StepBatches, StepInputs, optimizer_step
from tests.support.tiny_model import plan_of, prepared_split, tiny_spec, write_tiny_llama

WAITS = {"tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "is_nonzero", "nonzero", "unique"}
"""Functions of tensors that give the host a value, or a shape that depends on values."""
OPERATORS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::equal"}
"""The same below, where torch's own code asks."""


class HostWaits(TorchDispatchMode):
    """Names of the functions outside torch that asked for a value of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._memories: dict[int, Any] = {}

    def put(self, *tensors: torch.Tensor) -> None:
        """These are on the device. Their memory is kept, so that no other gets its number."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._memories[storage._cdata] = storage

    def has(self, values: Any) -> bool:
        tensors = [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
        return any(each.untyped_storage()._cdata in self._memories for each in tensors)

    def wait(self) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
            frame = frame.f_back
        self.found.append(frame.f_code.co_name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.has((args, kwargs)):
            if func.name() in OPERATORS:
                self.wait()
            self.put(*(each for each in tree_leaves(result) if isinstance(each, torch.Tensor)))
        return result


class Asked(TorchFunctionMode):
    """What no operator shows, because a CPU reads the memory."""

    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(self._waits.found)
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in WAITS and self._waits.has(args) and len(self._waits.found) == before:
            self._waits.wait()
        return result


@pytest.fixture
def waits_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    def found(attention: Attention, *, also: Callable[[torch.Tensor], object] = lambda _: None) -> list[str]:
        """In the second step; the first makes the optimizer's state."""
        spec = tiny_spec(training={"microBatchSize": 2}, parallelism={"processesPerNode": 1})
        plan, gang = plan_of(spec).with_attention(attention), Gang(0, 1, 0, torch.device("cpu"), None)
        waits, objective = HostWaits(), NextToken()

        def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
            moved = data_batches.to_device(tensor, device).clone()
            waits.put(moved)
            return moved

        def kernel(*arguments: Any, **named: Any) -> torch.Tensor:
            also(arguments[0])
            return variable_length.by_document(*arguments, **named)

        monkeypatch.setattr(next_token, "to_device", to_device)
        monkeypatch.setattr(variable_length, "to_device", to_device)
        monkeypatch.setattr(variable_length, "_kernel", lambda _: kernel)
        trained = sharded.build(plan, write_tiny_llama(tmp_path / "base"), gang, objective)
        optimizer = build_optimizer(trained.pieces, plan)
        split = PreparedSplit.of(prepared_split(8, 1), pad_token_id=256)
        batches = StepBatches(split, plan.training, gang)
        inputs = StepInputs(trained.module, objective, batches, plan.training, gang, autocast=None)

        def step(number: int) -> None:
            optimizer_step(inputs, optimizer, step=number, learning_rate=1e-3, stop_requested=False)

        step(0)
        waits.put(*trained.module.parameters(), *trained.module.buffers())
        with waits, Asked(waits):
            step(1)
        # What stands for the kernel reads the bounds.
        return [name for name in waits.found if name != "by_document"]

    return found


def test_a_step_waits_for_the_device_once(waits_of: Callable[..., list[str]]) -> None:
    assert waits_of(Attention.VARLEN) == ["optimizer_step"]


def test_a_mask_takes_a_wait_for_each_micro_batch(waits_of: Callable[..., list[str]]) -> None:
    """transformers looks whether a batch is packed at all, by its values: of two micro-batches in a step."""
    assert waits_of(Attention.SDPA) == ["find_packed_sequence_indices"] * 2 + ["optimizer_step"]


@pytest.mark.parametrize(
    "ask",
    [
        torch.Tensor.tolist,
        torch.Tensor.cpu,
        torch.nonzero,
        lambda each: bool(each.sum() > 0),
        lambda each: float(each.sum().detach()),
    ],
)
def test_every_way_to_ask_is_noticed(waits_of: Callable[..., list[str]], ask: Callable[[torch.Tensor], object]) -> None:
    """Guards the tests above: in each of two layers of two micro-batches."""
    assert len(waits_of(Attention.VARLEN, also=ask)) == 5


def test_a_gpu_copies_from_pages_that_stay_where_they_are() -> None:
    tensor, gpu = Mock(spec=torch.Tensor), torch.device("cuda", 1)
    assert data_batches.to_device(tensor, gpu) is tensor.pin_memory().to.return_value
    tensor.pin_memory().to.assert_called_once_with(gpu, non_blocking=True)
    tensor.to.assert_not_called()

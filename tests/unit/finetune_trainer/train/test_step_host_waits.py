"""In an optimizer step the host waits for the device once.

On a CPU nobody waits, so what would be on a device is followed: the model, what `to_device` returns, and all that is computed
from them. Asking for a value of that is a wait.
"""

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
from transformers import PreTrainedModel

from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.data import batches as data_batches
from finetune_trainer.model import variable_length
from finetune_trainer.objective import next_token
from tests.support.shapes import SmallRun, plan_of_shape, write_shape

WAITS = {"tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "is_nonzero"}
"""Functions of tensors that give the host a value."""
OPERATORS = {
    "aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::bincount", "aten::_unique2",
    "aten::unique_consecutive", "aten::unique_dim", "aten::unique_dim_consecutive",
}  # fmt: skip
"""The same below, where torch's own code asks; and those whose result has as many values as the values say."""
INDEXING = {"aten::index.Tensor", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
"""Those that look for the elements first if an index is a mask."""


def waits_for_a_value(name: str, args: Any, kwargs: Any) -> bool:
    """Whether this operator lets the host wait for a device that its arguments are on."""
    if name in INDEXING:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if name == "aten::repeat_interleave.Tensor":
        return kwargs.get("output_size") is None
    return name in OPERATORS


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
            if waits_for_a_value(func.name(), args, kwargs or {}):
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
    def found(plan: RunPlan, kind: str = "llama") -> list[str]:
        """In the second step; the first makes the optimizer's state."""
        waits = HostWaits()

        def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
            moved = data_batches.to_device(tensor, device).clone()
            waits.put(moved)
            return moved

        monkeypatch.setattr(next_token, "to_device", to_device)
        monkeypatch.setattr(variable_length, "to_device", to_device)
        monkeypatch.setattr(variable_length, "_kernel", lambda _: variable_length.by_document)
        run = SmallRun(plan, write_shape(tmp_path / "base", kind))
        run.step(0)
        waits.put(*run.model.parameters(), *run.model.buffers())
        with waits, Asked(waits):
            run.step(1)
        # What stands for the kernel reads the bounds.
        return [name for name in waits.found if name != "by_document"]

    return found


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral", "gpt2"])
def test_a_step_waits_for_the_device_once(waits_of: Callable[..., list[str]], kind: str) -> None:
    """Of Mixtral: transformers sorts the tokens by experts and multiplies in groups (grouped_mm), which looks at no value in
    bfloat16 on a device of compute capability 9 or 10, and reads how many tokens each expert has on others.
    """
    assert waits_of(plan_of_shape(kind, is_fast=True), kind) == ["optimizer_step"]


@pytest.mark.parametrize("settings", [{"method": "QLoRA"}, {"method": "DoRA"}, {"method": "Full"}, {"dropout": "0.1"}], ids=str)
def test_so_does_a_step_of_other_methods(waits_of: Callable[..., list[str]], settings: dict[str, Any]) -> None:
    assert waits_of(plan_of_shape("llama", is_fast=True, **{"precision": "bf16", **settings})) == ["optimizer_step"]


def test_a_loop_over_experts_would_wait_in_each_layer(
    waits_of: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is why the product leaves the choice to transformers."""
    monkeypatch.setattr(PreTrainedModel, "get_correct_experts_implementation", lambda *_: "eager")
    waits = waits_of(plan_of_shape("mixtral", is_fast=True), "mixtral")
    # For the experts that any token goes to, of two layers of two micro-batches, and for the tokens of each.
    assert waits.count("forward") > 4


def test_so_does_a_step_of_virtual_ranks(waits_of: Callable[..., list[str]]) -> None:
    """Each of the two computes one micro-batch, and the losses are read together."""
    plan = plan_of_shape("llama", is_fast=True, ranks=2, reduction="Ordered")
    assert waits_of(plan) == ["optimizer_step"]


def test_a_mask_takes_a_wait_for_each_micro_batch(waits_of: Callable[..., list[str]]) -> None:
    """transformers looks whether a batch is packed at all, by its values: of two micro-batches in a step."""
    assert waits_of(plan_of_shape("llama", is_fast=False)) == ["find_packed_sequence_indices"] * 2 + ["optimizer_step"]


def test_gemma_2_takes_two_because_it_has_two_masks(waits_of: Callable[..., list[str]]) -> None:
    """One with its window and one without; attention by bounds has no cap of scores."""
    assert waits_of(plan_of_shape("gemma2", is_fast=True), "gemma2") == ["find_packed_sequence_indices"] * 4 + ["optimizer_step"]


@pytest.mark.parametrize(
    "ask",
    [
        torch.Tensor.tolist,
        torch.Tensor.cpu,
        torch.nonzero,
        torch.argwhere,
        torch.unique,
        torch.unique_consecutive,
        lambda each: torch.unique_consecutive(each, dim=0),
        lambda each: torch.where(each > 0),
        lambda each: torch.masked_select(each, each > 0),
        lambda each: torch.equal(each, each + 1),
        lambda each: torch.bincount((each.flatten() > 0).long()),
        lambda each: torch.repeat_interleave((each.flatten() > 0).long()),
        lambda each: each[each > 0],
        lambda each: each.detach().clone().index_put_((each > 0,), each.detach()[0, 0, :1]),
        lambda each: 3.0 in each,
        lambda each: bool(each.sum() > 0),
        lambda each: float(each.sum().detach()),
    ],
)
def test_every_way_to_ask_is_noticed(ask: Callable[[torch.Tensor], object]) -> None:
    """Guards the tests above."""
    assert len(waits_for(ask)) == 1


def waits_for(ask: Callable[[torch.Tensor], object]) -> list[str]:
    waits, values = HostWaits(), torch.rand(4, 2, 8, requires_grad=True)
    waits.put(values)
    with waits, Asked(waits):
        ask(values)
    return waits.found


@pytest.mark.parametrize(
    "ask",
    [
        lambda each: each[torch.zeros(3, dtype=torch.int64)],
        lambda each: each.repeat_interleave(2, dim=0),
        lambda each: torch.where(each > 0, each, 0.0),
        lambda each: each.masked_fill(each > 0, 0.0),
        torch.Tensor.contiguous,
    ],
)
def test_what_takes_no_value_is_no_wait(ask: Callable[[torch.Tensor], object]) -> None:
    assert waits_for(ask) == []


def test_a_gpu_copies_from_pages_that_stay_where_they_are() -> None:
    tensor, gpu = Mock(spec=torch.Tensor), torch.device("cuda", 1)
    assert data_batches.to_device(tensor, gpu) is tensor.pin_memory().to.return_value
    tensor.pin_memory().to.assert_called_once_with(gpu, non_blocking=True)
    tensor.to.assert_not_called()

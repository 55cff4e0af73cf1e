"""Reentrant checkpoints lose the gradients of layers whose inputs need none, and DDP's order of gradients."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.pitfalls.lab.case import Case
from tests.pitfalls.lab.expect import trains
from tests.pitfalls.lab.ranks import run_ranks


def gradients(use_reentrant: bool, inputs_need_gradients: bool = False) -> torch.Tensor | None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4)
    inputs = torch.randn(2, 4, requires_grad=inputs_need_gradients)
    checkpoint(layer, inputs, use_reentrant=use_reentrant).sum().backward()
    return layer.weight.grad


def test_reentrant_checkpoints_need_inputs_with_gradients():
    with (
        pytest.warns(UserWarning, match="None of the inputs have requires_grad"),
        pytest.raises(RuntimeError, match="does not require grad"),
    ):
        gradients(use_reentrant=True)
    expected = gradients(use_reentrant=False)
    assert expected is not None
    assert torch.equal(expected, gradients(use_reentrant=True, inputs_need_gradients=True))


@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_transformers_own_checkpoints_train(version, kind):
    """It asks for gradients of the embeddings' output itself, where it knows of an adapter."""
    trains(Case(version=version, checkpointing=kind))


def distributed_step(rank: int, use_reentrant: bool, find_unused_parameters: bool) -> None:
    torch.manual_seed(0)

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                inputs = checkpoint(self.layer, inputs, use_reentrant=use_reentrant)
            return inputs

    model = torch.nn.parallel.DistributedDataParallel(Twice(), find_unused_parameters=find_unused_parameters)
    model(torch.randn(2, 4, requires_grad=True)).sum().backward()


def test_ddp_counts_reentrant_gradients_twice():
    errors = [result.error for result in run_ranks(distributed_step, True, True) if result.failed]
    assert errors
    assert "Expected to mark a variable ready only once" in errors[0]
    assert not any(result.failed for result in run_ranks(distributed_step, False, False))

"""Optimizer state: created, saved and resumed whole, or refused."""

from pathlib import Path

import pytest
import torch
from torch import nn

from finetune_trainer.checkpoint.load import load, newest_valid
from finetune_trainer.checkpoint.state import create_state, optimizer_entry, pieces
from finetune_trainer.errors import CheckpointError, InvariantError
from tests.unit.finetune_trainer.checkpoint.saved_models import ALONE, ORIGIN, model_and_optimizer, save

OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "RAdam": torch.optim.RAdam,
    "SGD": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    "SGD without momentum": torch.optim.SGD,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_resumes_to_the_same_bytes(tmp_path: Path, name: str) -> None:
    def trained(steps: range, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in steps:
            torch.manual_seed(step)
            model(torch.randn(4, 5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        optimizer = OPTIMIZERS[name](model.parameters())
        create_state(optimizer)
        return model, optimizer

    model, optimizer = fresh()
    trained(range(3), model, optimizer)
    save(tmp_path, 3, model, optimizer)
    trained(range(3, 6), model, optimizer)
    resumed, fresh_optimizer = fresh()
    found = newest_valid(tmp_path, ALONE, ORIGIN)
    assert found is not None
    load(*found, pieces(resumed), fresh_optimizer)
    trained(range(3, 6), resumed, fresh_optimizer)
    for expected, parameter in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(expected, parameter)
        assert optimizer_entry(fresh_optimizer) == optimizer_entry(optimizer)
    other = OPTIMIZERS["SGD" if name != "SGD" else "AdamW"](resumed.parameters())
    with pytest.raises(CheckpointError, match="holds state of"):
        load(*found, pieces(resumed), other)


def test_optimizer_state_that_is_not_whole_is_noticed() -> None:
    model, optimizer = model_and_optimizer(1)
    first, second, *_ = model.parameters()
    optimizer.state[first]["step"].fill_(2)
    with pytest.raises(InvariantError, match="different steps"):
        optimizer_entry(optimizer)
    optimizer.state[first]["step"].fill_(1)
    del optimizer.state[second]["exp_avg"]
    with pytest.raises(InvariantError, match="has optimizer state"):
        optimizer_entry(optimizer)

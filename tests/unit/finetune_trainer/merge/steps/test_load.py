"""Trained rows of an embedding replace their own rows and no others, wherever blocks begin."""

from pathlib import Path

import pytest
import torch

from finetune_trainer.merge.changes import TokenRows
from finetune_trainer.merge.steps.load import load_step
from finetune_trainer.merge.steps.step import Scratch
from finetune_trainer.weights.headers import TensorHeader

ROWS, COLUMNS = 700, 4
STORED = TensorHeader("rows", "F32", (1, COLUMNS), Path("adapter.safetensors"), 0)


def applied(indices: tuple[int, ...], blocks: list[tuple[int, int]] | None = None) -> torch.Tensor:
    """Return a matrix of ones after its rows `indices` were trained: row number n among them has the values 10 * n + 2."""
    tokens = torch.arange(len(indices), dtype=torch.float32)[:, None].expand(-1, COLUMNS) * 10 + 2
    step = load_step(TokenRows(indices, STORED), ROWS, COLUMNS, torch.float32, lambda _: tokens)
    values, out = torch.ones(ROWS, COLUMNS), torch.zeros(ROWS, COLUMNS)
    for first, last in blocks or step.row_blocks(ROWS, COLUMNS):
        assert step.apply(values[first:last], (first, last), out[first:last], Scratch())
    return out


@pytest.mark.parametrize("size", [1, 7, 64, 256, 700])
def test_blocks_of_any_size_give_the_same(size: int) -> None:
    indices = (0, 6, 7, 64, 255, 256, 512, 699)
    blocks = [(first, min(first + size, ROWS)) for first in range(0, ROWS, size)]
    out = applied(indices, blocks)
    assert out[list(indices), 0].tolist() == [2.0, 12.0, 22.0, 32.0, 42.0, 52.0, 62.0, 72.0]
    assert int((out != 1).any(dim=1).sum()) == len(indices)


def test_the_last_row_of_a_repeated_index_applies() -> None:
    assert applied((256, 256))[256, 0] == 12


def test_a_row_that_is_not_finite_is_seen() -> None:
    step = load_step(TokenRows((3,), STORED), ROWS, COLUMNS, torch.float32, lambda _: torch.full((1, COLUMNS), torch.nan))
    out = torch.zeros(8, COLUMNS)
    assert not step.apply(torch.ones(8, COLUMNS), (0, 8), out, Scratch())
    assert step.apply(torch.ones(8, COLUMNS), (8, 16), out, Scratch())

"""Figures of two models' logits, against values by hand."""

import math
from pathlib import Path

import pytest
import torch

from finetune_trainer.verify import figures
from finetune_trainer.verify.figures import LogitsFile, _kl, figures_of_prompts, figures_together, mean_of_least
from finetune_trainer.verify.gate import GATES


def stored(path: Path, rows: list[list[float]]) -> LogitsFile:
    path.write_bytes(torch.tensor(rows).numpy().tobytes())
    return LogitsFile(path, len(rows), torch.float32)


def test_figures_are_those_of_all_positions_of_all_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of one position, so that each block counts."""
    monkeypatch.setattr(figures, "VALUES_AT_ONCE", 2)
    even, tilted = [0.0, 0.0], [0.0, math.log(3.0)]  # probabilities 1/2, 1/2 and 1/4, 3/4
    first = tuple(
        stored(tmp_path / name, rows) for name, rows in (("a", [even, tilted]), ("b", [tilted, tilted]), ("c", [even, even]))
    )
    second = tuple(stored(tmp_path / name, [[5.0, -1.0]]) for name in "def")
    found = figures_together(figures_of_prompts([first, second]), chooses_experts=False)
    assert (found.num_prompts, found.num_positions, found.max_abs_logit) == (2, 3, 5.0)
    assert found.max_abs_difference == found.usual_abs_difference == pytest.approx(math.log(3.0))
    # Only the second position differs from the merged model: 1/4 ln 1/2 + 3/4 ln 3/2; and the first one from the base.
    assert found.mean_kl == pytest.approx(0.13081203594113694 / 3)
    assert found.effect_mean_kl == pytest.approx(0.14384103622589045 / 3)
    assert found.top1_agreement == pytest.approx(2 / 3)  # the merged model chooses the first of two equal tokens


def test_a_vocabulary_of_another_size_leaves_no_figure_that_passes(tmp_path: Path) -> None:
    reference, base, merged = (stored(tmp_path / name, [[0.0] * size]) for name, size in (("a", 2), ("b", 2), ("c", 3)))
    alike = figures_of_prompts([(reference, base, base)])
    found = figures_together([*alike, *figures_of_prompts([(reference, base, merged)]), *alike], chooses_experts=False)
    assert all(math.isnan(value) for value in (found.max_abs_difference, found.usual_abs_difference, found.mean_kl))
    assert found.top1_agreement == pytest.approx(2 / 3)


def test_a_divergence_is_the_mean_of_the_positions_that_diverge_least() -> None:
    """Of 42 positions one ill-conditioned one had a divergence that made the mean of all eight times what is allowed."""
    values = torch.full((42,), 1e-6, dtype=torch.float64)
    values[7] = 0.034
    assert values.mean() > 8 * GATES["float16"].max_mean_kl
    assert mean_of_least(values, 0.9) == pytest.approx(1e-6)
    assert mean_of_least(torch.tensor([3.0, 1.0, 2.0]), 0.5) == 1.5
    assert mean_of_least(torch.tensor([3.0]), 0.5) == 3.0
    assert math.isnan(mean_of_least(torch.tensor([1.0] * 99 + [math.nan]), 0.5))


def test_a_divergence_is_that_of_the_distributions_whatever_is_added_to_their_logits() -> None:
    reference = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]).log() + 7
    other = torch.tensor([[0.25, 0.75, 0.0], [0.2, 0.3, 0.5]]).log() - 3
    divergence, itself = _kl(reference, other, reference)
    # 0.5 ln 2 + 0.5 ln (2 / 3); the third token is ruled out in both.
    assert divergence.tolist() == pytest.approx([0.14384103622589045, 0.0], abs=1e-7)
    assert itself.tolist() == pytest.approx([0.0, 0.0], abs=1e-15)

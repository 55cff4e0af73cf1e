"""The loss of float16 runs is scaled: nothing vanishes, no overflow costs a record, and a resumed run scales alike."""

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from finetune_trainer.checkpoint.manifest import LossScale
from finetune_trainer.data.batches import PreparedData
from finetune_trainer.errors import NonFiniteError
from finetune_trainer.model.sharded import build
from finetune_trainer.objective.next_token import NextToken
from finetune_trainer.observe.steps import StepResult
from finetune_trainer.ranks.gang import Gang
from finetune_trainer.train.optimizers import build_optimizer
from finetune_trainer.train.policy import (
    FIRST_LOSS_SCALE,
    LARGEST_LOSS_SCALE,
    LOSS_SCALE_GROWTH_STEPS,
    UNSCALED,
    halved_loss_scale,
    next_loss_scale,
)
from finetune_trainer.train.step import StepBatches, StepInputs, optimizer_step
from tests.support.forked_ranks import Fault, run_gang, trained_files, wrap
from tests.support.tiny_model import plan_of, run_context, tiny_spec

ALONE = Gang(0, 1, 0, torch.device("cpu"), None)
FLOAT16: dict[str, Any] = {"model": {"dtype": "float16"}, "method": {"lora": {"r": 4}}}


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(0, LOSS_SCALE_GROWTH_STEPS))
def test_factors_are_powers_of_two_between_one_and_the_largest(overflows: list[int], steps: int) -> None:
    scale = LossScale(factor=FIRST_LOSS_SCALE.factor, steps=steps)
    for count in overflows:
        factor: float | None = scale.factor
        for _ in range(count):
            factor = halved_loss_scale(factor) if factor is not None else None
        scale = next_loss_scale(scale, factor or UNSCALED)
        assert UNSCALED <= scale.factor <= LARGEST_LOSS_SCALE
        assert scale.factor.as_integer_ratio()[0].bit_count() == 1
        assert 0 <= scale.steps < LOSS_SCALE_GROWTH_STEPS


@dataclass(frozen=True)
class Overflow:
    """On rank 1 alone, in the second step."""

    call: int = 2

    def arm(self, rank: int) -> None:
        calls = itertools.count(1)

        def infinite(original: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
            norm = original(*arguments)
            return norm * float("inf") if rank == 1 and next(calls) == self.call else norm

        wrap("train.step:squared_norm", infinite)


class Step:
    """One step of the same adapters, computed in float16 or float32."""

    def __init__(self, directory: Path, precision: str | None) -> None:
        spec = tiny_spec(**FLOAT16, parallelism={"processesPerNode": 1}, training={"precision": precision, "maxGradNorm": "0"})
        self.context = run_context(directory, spec)
        self.plan = plan_of(spec)
        self.data = PreparedData.open(self.context.workspace.prepared)
        self.gradients: dict[str, torch.Tensor] = {}

    def __call__(self, factor: float) -> StepResult:
        model = build(self.plan, self.context.base_model, ALONE, NextToken())
        assert model.scales_loss is (self.plan.training.precision is None)
        with torch.no_grad():
            for name, parameter in model.module.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
                if name.endswith("model.norm.weight"):
                    # What comes before it hardly changes the loss.
                    parameter.mul_(1e-3)
        optimizer = build_optimizer(model.pieces, self.plan)
        optimizer.register_step_pre_hook(
            lambda *_: self.gradients.update({piece.name: piece.holder.grad.clone() for piece in model.pieces})
        )
        batches = StepBatches(self.data.train, self.plan.training, ALONE)
        inputs = StepInputs(model.module, NextToken(), batches, self.plan.training, ALONE, model.autocast)
        return optimizer_step(inputs, optimizer, step=0, learning_rate=0.0, stop_requested=False, loss_scale=factor)


def test_small_gradients_are_there_and_as_large_as_in_float32(tmp_path: Path) -> None:
    exact, scaled, plain = (Step(tmp_path / name, precision) for name, precision in (("a", "fp32"), ("b", None), ("c", None)))
    exact(UNSCALED)
    result = scaled(FIRST_LOSS_SCALE.factor)
    plain(UNSCALED)

    def distances(step: Step) -> list[float]:
        return [
            float((step.gradients[name] - wanted).norm() / wanted.norm())
            for name, wanted in exact.gradients.items()
            if "lora_A" in name
        ]

    assert result.loss == pytest.approx(plain(UNSCALED).loss, rel=1e-6)
    assert max(distances(scaled)) < 0.02
    assert max(distances(plain)) > 5 * max(distances(scaled)), "without a factor the same gradients lose most of their bits"


def test_a_step_whose_gradients_overflow_is_done_again_with_half_the_factor(tmp_path: Path) -> None:
    once, again = Step(tmp_path / "a", None), Step(tmp_path / "b", None)
    result = again(2.0**60)
    assert UNSCALED < result.loss_scale < 2.0**60
    wanted = once(result.loss_scale)
    assert (result.loss, result.gradient_norm, result.tokens) == (wanted.loss, wanted.gradient_norm, wanted.tokens)
    assert all(torch.equal(again.gradients[name], gradient) for name, gradient in once.gradients.items())


def test_gradients_that_are_not_finite_by_themselves_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def infinite(gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
        tried.append(len(gradients))
        return torch.full((), float("inf"), device=device)

    monkeypatch.setattr("finetune_trainer.train.step.squared_norm", infinite)
    with pytest.raises(NonFiniteError, match="gradient norm is inf"):
        Step(tmp_path, None)(8.0)
    assert len(tried) == 4


def test_all_ranks_do_a_step_again_where_gradients_of_one_overflow(tmp_path: Path) -> None:
    """And a run that is killed after it, and resumed, ends with the same bytes, factor included."""
    lora = {"r": 4, "targetModules": ["q_proj", "v_proj"]}
    spec = tiny_spec(**{**FLOAT16, "method": {"lora": lora}}, parallelism={"fsdp": {"version": 2}})
    contexts = [run_context(tmp_path / name, spec, dtype=torch.float16) for name in ("undisturbed", "killed")]
    assert run_gang(contexts[0], [Overflow()]) == [0, 0]
    run_gang(contexts[1], [Overflow(), Fault("train.step:optimizer_step", call=5, rank=1)])
    assert run_gang(contexts[1]) == [0, 0]
    assert trained_files(contexts[1]) == trained_files(contexts[0])
    lines = [json.loads(line) for line in contexts[1].workspace.history.read_text().splitlines()]
    factors = [line["loss_scale"] for line in lines if line["step"] > 0]
    assert factors == [FIRST_LOSS_SCALE.factor] + [FIRST_LOSS_SCALE.factor / 2] * (len(factors) - 1)

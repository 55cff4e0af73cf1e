"""The gate of FP8: passes what teaches the same, refuses what does not, and leaves nothing behind."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from finetune_trainer.data.batches import PreparedData
from finetune_trainer.errors import ConfigError
from finetune_trainer.model import fp8_products
from finetune_trainer.model.adapters import attach
from finetune_trainer.model.fp8_products import install_fp8
from finetune_trainer.objective.next_token import NextToken
from finetune_trainer.ranks.gang import Gang
from finetune_trainer.train import fp8_gate
from finetune_trainer.train.fp8_gate import Fp8Figures, check_fp8
from finetune_trainer.train.step import StepBatches, StepInputs, StepTotals
from tests.support.forked_ranks import Disturbance, run_gang, wrap
from tests.support.tiny_model import plan_of, run_context, tiny_spec, write_tiny_llama, write_tiny_prepared

ALONE = Gang(0, 1, 0, torch.device("cpu"), None)
SPEC = tiny_spec(
    method={"type": "LoRA", "lora": {"r": 4}},
    training={"maxSteps": 2, "globalBatchSize": 8, "microBatchSize": 2, "precision": "bf16", "fp8": True},
)


@pytest.fixture
def checked(tmp_path: Path) -> Any:
    """What runs the gate on the tiny model, and that model."""
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(write_tiny_llama(tmp_path / "model"), dtype=torch.bfloat16)
    write_tiny_prepared(tmp_path / "prepared")
    plan, objective = plan_of(SPEC), NextToken()
    torch.manual_seed(2)
    model = attach(base, plan)
    install_fp8(model, None, ALONE.device, torch.bfloat16)
    objective.install(model)
    batches = StepBatches(PreparedData.open(tmp_path / "prepared").train, plan.training, ALONE)

    def check() -> Fp8Figures:
        return check_fp8(StepInputs(model, objective, batches, plan.training, ALONE, autocast=torch.bfloat16))

    return check, model


def test_what_teaches_the_same_passes_and_says_so(checked: Any, caplog: pytest.LogCaptureFixture) -> None:
    check, model = checked
    with caplog.at_level(logging.INFO):
        figures = check()
    assert 0 < abs(figures.loss_difference) < 0.005
    assert 0.98 < figures.cosine < 1
    assert f"the gradients' cosine is {figures.cosine:.4f}" in caplog.text
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(layer.computes_in_fp8 for layer in model.modules() if isinstance(layer, fp8_products.Fp8Linear))


def test_gradients_that_point_elsewhere_are_refused_before_the_first_step(checked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check, _ = checked
    original = fp8_products.scaled_product

    def backward_is_wrong(first: torch.Tensor, second: torch.Tensor, *, sums_fast: bool) -> torch.Tensor:
        found = original(first, second, sums_fast=sums_fast)
        return found if sums_fast else found.roll(1, dims=1)

    monkeypatch.setattr(fp8_products, "scaled_product", backward_is_wrong)
    with pytest.raises(ConfigError, match=r"spec.training.fp8: the loss of the first batch differs by [-+]0.\d+%") as refused:
        check()
    assert "allowed are 1% and at least 0.95" in str(refused.value)
    assert refused.value.hint == "set spec.training.fp8: false"


def test_nothing_is_compiled_for_the_gate(checked: Any) -> None:
    check, model = checked
    torch._dynamo.reset()
    counters.clear()
    for layer in model.get_base_model().model.layers:
        layer.compile(backend="eager")
    assert check().passes
    assert not counters["stats"]
    model(input_ids=torch.tensor([[1, 2, 3]]))
    assert counters["stats"]["unique_graphs"], "what follows is"
    torch._dynamo.reset()


def test_a_loss_that_is_off_is_refused(checked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check, _ = checked
    original = fp8_products.scaled_product
    monkeypatch.setattr(
        fp8_products,
        "scaled_product",
        lambda first, second, *, sums_fast: original(first, second, sums_fast=sums_fast) * (8.0 if sums_fast else 1.0),
    )
    with pytest.raises(ConfigError, match="the loss of the first batch differs"):
        check()


@pytest.mark.parametrize(
    ("loss", "cosine", "passes"),
    [
        (0.0, 1.0, True),
        (0.01, 0.95, True),
        (-0.01, 0.95, True),
        (0.0101, 1.0, False),
        (-0.0101, 1.0, False),
        (0.0, 0.9499, False),
        (0.0, -1.0, False),
        (math.nan, 1.0, False),
        (0.0, math.nan, False),
        (math.inf, 1.0, False),
    ],
)
def test_the_bounds(loss: float, cosine: float, passes: bool) -> None:
    assert Fp8Figures(loss, cosine).passes is passes


def test_gradients_of_no_length_are_alike_only_if_both_have_none(checked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check, _ = checked
    monkeypatch.setattr(fp8_gate, "local_gradients", lambda _model: [torch.zeros(3)])
    assert check().cosine == 1
    in_turn = iter(([torch.ones(3)], [torch.zeros(3)]))
    monkeypatch.setattr(fp8_gate, "local_gradients", lambda _model: next(in_turn))
    with pytest.raises(ConfigError):
        check()


def test_a_batch_in_which_nothing_is_learnt_passes_unless_fp8_alone_loses_something(
    checked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, _ = checked
    in_turn = iter((0.0, 0.0, 0.0, 1.0))
    monkeypatch.setattr(fp8_gate, "compute_gradients", lambda *_, **__: StepTotals(torch.tensor([next(in_turn)])))
    assert check() == Fp8Figures(loss_difference=0.0, cosine=1.0)
    with pytest.raises(ConfigError, match=r"differs by [+]nan%"):
        check()


class Counting(Disturbance):
    """Writes down how often the gate was asked, and whether it found any difference, which there is if layers are in FP8."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def arm(self, rank: int) -> None:
        def asked(original: Any, *args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            with (self.place / f"asked-{rank}").open("a") as file:
                file.write("same" if found.cosine == 1 else "x")
            return found

        wrap("train.run:check_fp8", asked)


def test_a_gang_asks_once_and_a_resumed_one_not_again(tmp_path: Path) -> None:
    spec = {
        **SPEC,
        "parallelism": {"processesPerNode": 2, "fsdp": {"version": 2}},
        "checkpoint": {"everySteps": 1},
        "data": {**SPEC["data"], "validation": None},
    }
    context = run_context(tmp_path, spec, dtype=torch.bfloat16)
    assert run_gang(replace(context, until_step=1), [Counting(tmp_path)]) == [0, 0]
    assert run_gang(context, [Counting(tmp_path)]) == [0, 0]
    assert [(tmp_path / f"asked-{rank}").read_text() for rank in (0, 1)] == ["x", "x"]

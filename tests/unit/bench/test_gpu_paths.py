"""The tier of kernel paths notices what is wrong, on the CPU or on the device alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.gpu import paths
from bench.gpu.scale import Rows, Scale
from finetune_trainer.model import variable_length

CPU = torch.device("cpu")


def test_every_switch_of_the_fast_path_is_tried() -> None:
    plans = [path.plan(may_compile=True) for path in paths.PATHS.values()]
    assert {plan.model.attention.value for plan in plans} == {"varlen", "sdpa"}
    assert {plan.method.lora is not None and plan.method.lora.fused_forward for plan in plans} == {True, False}
    assert {plan.training.compile for plan in plans} == {True, False}
    assert {plan.method.type.value for plan in plans} == {"LoRA", "QLoRA", "DoRA", "Full"}


def test_a_path_that_is_wrong_everywhere_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = variable_length.by_document

    def without_scale(*arguments: Any, **named: Any) -> torch.Tensor:
        return original(*arguments, **named | {"scale": 1.0})

    monkeypatch.setattr(variable_length, "by_document", without_scale)
    monkeypatch.setattr(paths, "QUICK", ("LoRA", "a mask, and PEFT's layers"))
    rows: Rows = []
    assert paths.paths(Scale(CPU, 0, is_quick=True), rows) == "further from float32 on the CPU than they may be: LoRA"
    assert [row["is_within_bound"] for row in rows] == [False, True]


@pytest.mark.parametrize(("factor", "problem"), [(1.0, ""), (1.05, "further from float32 on the CPU than they may be: LoRA")])
def test_a_path_that_is_wrong_on_the_device_is_named(monkeypatch: pytest.MonkeyPatch, factor: float, problem: str) -> None:
    """Its are the third gradients, after those in float32 and those of the same path on the CPU."""
    original, calls = paths._gradients, []

    def gradients(*arguments: Any) -> torch.Tensor:
        calls.append(None)
        return original(*arguments) * (factor if len(calls) > 2 else 1.0)

    monkeypatch.setattr(paths, "_gradients", gradients)
    monkeypatch.setattr(paths, "QUICK", ("LoRA",))
    assert paths.paths(Scale(CPU, 0, is_quick=True), []) == problem

"""However a run is split over ranks, micro-steps and FSDP units, it is the same run."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finetune_trainer.context import RunContext
from tests.support.forked_ranks import run_gang
from tests.support.tiny_model import fused, run_context, tiny_spec

LORA = {"type": "LoRA", "lora": {"r": 4, "modulesToSave": ["lm_head"]}}
QLORA = {"type": "QLoRA", "lora": {"r": 4}}
TRAINING = {"maxSteps": 3, "learningRate": "1e-3", "globalBatchSize": 4}


def fsdp(processes: int = 2, **settings: Any) -> dict[str, Any]:
    return {"processesPerNode": processes, "fsdp": settings}


SPLITS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "lora-fsdp2-accumulated": (LORA, fsdp(reshardAfterForward=False), 1),
    "lora-fsdp2-four-ranks": (LORA, fsdp(4), 1),
    "lora-fsdp1-original-parameters": (LORA, fsdp(version=1, peftWrapPolicy=False, useOrigParams=True), 2),
    "lora-fsdp1-peft-policy": (LORA, fsdp(version=1, peftWrapPolicy=True, useOrigParams=False), 1),
    "qlora-fsdp2": (QLORA, fsdp(), 2),
}
"""test_step_against_plain_loop.py has other methods and shardings, step by step; the sweep draws more."""
AS_ON_GPU = ("lora-fsdp1-original-parameters", "lora-fsdp1-peft-policy", "qlora-fsdp2")
"""As on a GPU: their documents have no mask, and plain LoRA has a forward pass of our own. The run alone has neither."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def trained(method: str) -> RunContext:
        spec = {"LoRA": LORA, "QLoRA": QLORA}[method]
        context = run_context(
            tmp_path_factory.mktemp("alone"),
            tiny_spec(method=spec, training={**TRAINING, "microBatchSize": 4}, parallelism=fsdp(1)),
        )
        assert run_gang(context) == [0]
        return context

    return trained


@pytest.mark.parametrize("name", SPLITS)
def test_a_split_run_is_the_same_run(alone: Any, tmp_path: Path, name: str) -> None:
    method, parallelism, micro_batch_size = SPLITS[name]
    expected: RunContext = alone(method["type"])
    training = {**TRAINING, "microBatchSize": micro_batch_size}
    model = {"attention": "varlen"} if name in AS_ON_GPU else {}
    context = run_context(tmp_path, tiny_spec(method=method, training=training, parallelism=parallelism, model=model))
    if name in AS_ON_GPU:
        context = replace(context, plan=fused(context.plan))
    assert run_gang(context) == [0] * parallelism["processesPerNode"]
    for found_line, expected_line in zip(history(context), history(expected), strict=True):
        for key in set(expected_line) & {"loss", "eval_loss", "gradient_norm", "supervised_tokens", "learning_rate"}:
            assert found_line[key] == pytest.approx(expected_line[key], rel=2e-5), (key, found_line["step"])
    found, wanted = tensors(context), tensors(expected)
    assert set(found) == set(wanted)
    for tensor_name, tensor in wanted.items():
        # Adam divides by the gradient's size, so rounding in a gradient near zero may turn one update around: 2 x rate x steps.
        assert (found[tensor_name] - tensor).abs().max() <= 2 * 3 * 1e-3 + 1e-6, tensor_name
        assert (found[tensor_name] - tensor).norm() <= 0.02 * tensor.norm(), tensor_name


def history(context: RunContext) -> list[dict[str, Any]]:
    return [json.loads(line) for line in context.workspace.history.read_text().splitlines()]


def tensors(context: RunContext) -> dict[str, torch.Tensor]:
    (path,) = context.workspace.adapter.glob("*.safetensors")
    return load_file(path)

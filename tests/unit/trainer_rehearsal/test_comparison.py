"""Which differences of gradients rounding explains."""

from __future__ import annotations

import pytest
import torch

from finetune_job.api.base import Dtype
from finetune_job.api.training import Precision
from finetune_trainer.rehearsal.comparison import computes_in, differing_gradients, tolerance_of
from finetune_trainer.rehearsal.twin_plan import exact, twin_plan
from tests.support.tiny_model import plan_of, tiny_spec

WANTED = {"large": torch.full((4, 4), 1.0), "small": torch.full((4,), 1e-3)}


@pytest.mark.parametrize(
    ("dtype", "name", "factor", "is_seen"),
    [
        (torch.float32, "large", 1.001, False),
        (torch.float32, "large", 1.01, True),
        (torch.float32, "small", 0.5, True),
        (torch.bfloat16, "large", 1.05, False),
        (torch.bfloat16, "large", 0.5, True),
        (torch.bfloat16, "small", 0.5, False),
    ],
)
def test_a_share_of_a_gradient_is_seen_from_the_bound_on(dtype: torch.dtype, name: str, factor: float, is_seen: bool) -> None:
    found = {**WANTED, name: WANTED[name] * factor}
    sentences = list(differing_gradients(found, WANTED, tolerance_of(dtype)))
    assert bool(sentences) == is_seen, sentences
    assert all(name in sentence for sentence in sentences)


def test_what_rounding_does_to_one_process_is_allowed_to_ranks() -> None:
    found = {**WANTED, "large": WANTED["large"] * 1.3}
    tolerance = tolerance_of(torch.bfloat16)
    assert list(differing_gradients(found, WANTED, tolerance, {**WANTED, "large": WANTED["large"] * 0.99}))
    assert not list(differing_gradients(found, WANTED, tolerance, {**WANTED, "large": WANTED["large"] * 0.9}))


def test_a_tensor_too_few_and_one_that_is_no_number_are_seen() -> None:
    tolerance = tolerance_of(torch.bfloat16)
    assert list(differing_gradients({"large": WANTED["large"]}, WANTED, tolerance)) == ["ranks train 1 tensors, one process 2"]
    assert list(differing_gradients({**WANTED, "large": torch.full((4, 4), torch.nan)}, WANTED, tolerance))


@pytest.mark.parametrize(
    "spec",
    [
        tiny_spec(),
        tiny_spec(training={"maxSteps": 3, "globalBatchSize": 4, "precision": "bf16"}),
        tiny_spec(model={"source": "pvc://models/tiny", "dtype": "float16"}),
        tiny_spec(method={"type": "QLoRA", "lora": {"r": 4}, "quantization": {"computeDtype": "bfloat16"}}),
        tiny_spec(method={"type": "Full", "lora": None}),
    ],
    ids=["LoRA", "bf16", "float16", "QLoRA", "Full"],
)
def test_the_exact_run_computes_in_float32(spec: dict[str, object]) -> None:
    plan = plan_of(spec)
    assert computes_in(plan, torch.bfloat16).itemsize == 2
    assert computes_in(exact(plan), torch.bfloat16) is torch.float32
    assert exact(plan).training.precision is Precision.FP32
    assert exact(plan).model.dtype is Dtype.FLOAT32


def test_nothing_is_offloaded_where_there_is_no_device() -> None:
    plan = plan_of(tiny_spec(parallelism={"processesPerNode": 2, "fsdp": {"offloadParams": True}}))
    twin, changes = twin_plan(plan, None)
    assert plan.parallelism.fsdp.offload_params
    assert not twin.parallelism.fsdp.offload_params
    assert "parallelism.fsdp.offloadParams: True -> False" in [change.text() for change in changes]

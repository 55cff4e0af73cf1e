"""The plan of a rehearsal is the job's but for what a scaled-down model on two CPU ranks forces."""

import dataclasses

import pytest
import torch

from finetune_job.api.enumerations import Dtype
from finetune_job.api.training import Precision
from finetune_trainer.rehearsal.comparison import coarsest_dtype
from finetune_trainer.rehearsal.scaled_plan import float32_plan, scaled_plan
from finetune_trainer.small_models.shrink import shrink
from finetune_trainer.verify.gate import GATES, LogitFigures, gate_failures
from tests.support.tiny_model import plan_of, tiny_spec
from tests.unit.finetune_trainer.rehearsal.configurations import configuration


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
    assert coarsest_dtype(plan, torch.bfloat16).itemsize == 2
    assert coarsest_dtype(float32_plan(plan), torch.bfloat16) is torch.float32
    assert float32_plan(plan).training.precision is Precision.FP32
    assert float32_plan(plan).model.dtype is Dtype.FLOAT32


def test_nothing_is_offloaded_where_there_is_no_device() -> None:
    plan = plan_of(tiny_spec(parallelism={"processesPerNode": 2, "fsdp": {"offloadParams": True}}))
    twin, changes = scaled_plan(plan, None)
    assert plan.parallelism.fsdp.offload_params
    assert not twin.parallelism.fsdp.offload_params
    assert "parallelism.fsdp.offloadParams: True -> False" in [change.text() for change in changes]


@pytest.mark.parametrize(("is_small", "policy"), [(True, "TRANSFORMER_BASED_WRAP"), (False, "SIZE_BASED_WRAP")])
def test_a_smaller_model_is_divided_into_its_layers(is_small: bool, policy: str) -> None:
    """The modules that a size chooses are others there."""
    plan = plan_of(tiny_spec(parallelism={"fsdp": {"autoWrapPolicy": "SIZE_BASED_WRAP", "minNumParams": 10**9}}))
    twin, changes = scaled_plan(plan, shrink(configuration("llama-70b").to_dict()) if is_small else None)
    assert twin.parallelism.fsdp.auto_wrap_policy == policy
    assert twin.parallelism.fsdp.min_num_params == (None if is_small else 10**9)
    said = "parallelism.fsdp.autoWrapPolicy: SIZE_BASED_WRAP -> TRANSFORMER_BASED_WRAP"
    assert (said in [change.text() for change in changes]) is is_small


def test_layers_are_torchs_own() -> None:
    twin, changes = scaled_plan(plan_of(tiny_spec(training={"maxSteps": 3, "globalBatchSize": 4, "compile": True})), None)
    assert twin.training.compile is False
    assert "training.compile: True -> False" in [change.text() for change in changes]


@pytest.mark.parametrize(("same", "passes"), [(46, True), (39, True), (38, False), (24, False)])
def test_few_positions_do_not_fail_a_merge_by_noise(same: int, passes: bool) -> None:
    """46 of 48 are 95.8 %, where 97 % are required of a trained model."""
    merge = scaled_plan(plan_of(tiny_spec(merge={"verify": {"minTop1Agreement": "0.999"}})), None)[0].merge
    assert merge.min_top1_agreement is not None
    gate = dataclasses.replace(GATES["bfloat16"], min_top1_agreement=merge.min_top1_agreement, max_excused=0)
    figures = LogitFigures(4, 48, 0.01, 0.01, 1.0, 1e-4, 0.1, same / 48)
    assert (gate_failures(figures, gate) == ()) is passes

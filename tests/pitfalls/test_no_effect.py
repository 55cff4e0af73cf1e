"""Settings that nothing reads: the plan, which is all that containers get, is the same without them; and where they are read."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.model.adapters import attach
from finetune_trainer.model.wrap_plan import unit_names
from tests.pitfalls.manifests import JOB, plans, settled
from tests.pitfalls.one_process import llama
from tests.support.cases import table
from tests.unit.finetune_job.rules.manifests import manifest

F = "parallelism.fsdp."
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CLAIM = {"output.destination": "pvc://out/result"}


def plan_of(changes: dict[str, Any]) -> RunPlan:
    return resolve(JOB, FineTuneJobSpec.model_validate(manifest(changes)), None)


@pytest.mark.parametrize(("rule", "deaf", "setting", "listening"), table(__file__, "test_what_nothing_reads"))
def test_what_nothing_reads(rule: str, deaf: dict[str, Any], setting: dict[str, Any], listening: dict[str, Any] | None):
    wrong, right = plans(rule, {**deaf, **setting})
    assert settled(wrong) == settled(right)
    if listening is not None:
        assert settled(plan_of({**deaf, **listening, **setting})) != settled(plan_of({**deaf, **listening}))


@pytest.mark.parametrize(("kind", "packed"), [("LoRA", "QLoRA"), ("DoRA", "QDoRA")])
def test_lora_on_a_packed_base_is_asked_for_by_its_type(kind: str, packed: str):
    """Without the fix the base is not packed."""
    packing = {"method.quantization": {"quantType": "fp4"}}
    wrong, right = plans("quantization-without-qlora", {"method.type": kind, **packing})
    assert settled(wrong) == settled(plan_of({"method.type": kind}))
    assert settled(right) == settled(plan_of({"method.type": packed, **packing}))


def test_recomputation_is_asked_for_elsewhere():
    """Without the fix nothing is computed again."""
    wrong, right = plans("no-effect-activation-checkpointing", {F + "activationCheckpointing": True})
    assert settled(wrong) == settled(plan_of({}))
    found = [plan.training.activation_checkpointing.value for plan in (wrong, right)]
    assert found == ["None", "Full"]


def test_torchs_own_functions_do_not_take_the_settings_of_the_other_version():
    first, second = (set(inspect.signature(each).parameters) for each in (FullyShardedDataParallel.__init__, fully_shard))
    assert {"use_orig_params", "sync_module_states"} <= first - second
    assert "reshard_after_forward" in second - first


@pytest.mark.parametrize(
    ("rule", "deaf", "setting", "listening"),
    [
        (
            "wrap-class-without-transformer-policy",
            "SIZE_BASED_WRAP",
            {F + "transformerLayerClsToWrap": ["LlamaMLP"]},
            "TRANSFORMER_BASED_WRAP",
        ),
        ("min-num-params-without-size-policy", "TRANSFORMER_BASED_WRAP", {F + "minNumParams": 1500}, "SIZE_BASED_WRAP"),
    ],
)
def test_a_wrap_policy_looks_at_settings_of_its_own(rule: str, deaf: str, setting: dict[str, Any], listening: str):
    policy = f"{F}autoWrapPolicy"
    wrong, right = plans(rule, {policy: deaf, **setting})
    assert units(wrong) == units(right)
    assert units(plan_of({policy: listening, **setting})) != units(plan_of({policy: listening}))


def test_without_a_policy_every_rank_gathers_all():
    changes = {f"{F}autoWrapPolicy": "NO_WRAP", "parallelism.processesPerNode": 2}
    wrong, right = plans("no-wrap-gathers-everything", changes)
    assert units(wrong) == []
    assert len(units(right)) == 2


def units(plan: RunPlan) -> list[str]:
    """Modules that the trainer makes units of their own."""
    return unit_names(attach(llama(), plan), plan.parallelism.fsdp)

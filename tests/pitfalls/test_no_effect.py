"""Settings that nothing reads: the plan, which is all that containers get, is the same without them; and where they are read."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.model.adapters import adapter_config, attach
from finetune_trainer.model.wrap_plan import unit_names
from tests.pitfalls.manifests import JOB, plans, settled
from tests.pitfalls.one_process import llama
from tests.unit.finetune_job.rules.manifests import manifest

F = "parallelism.fsdp."
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CLAIM = {"output.destination": "pvc://out/result"}


def plan_of(changes: dict[str, Any]) -> RunPlan:
    return resolve(JOB, FineTuneJobSpec.model_validate(manifest(changes)), None)


@pytest.mark.reproduces
@pytest.mark.parametrize(
    ("rule", "deaf", "setting", "listening"),
    [
        ("no-effect-peft-wrap-policy", {F + "version": 2}, {F + "peftWrapPolicy": False}, {F + "version": 1}),
        ("no-effect-use-orig-params", {F + "version": 2}, {F + "useOrigParams": True}, {F + "version": 1}),
        ("no-effect-sync-module-states", {F + "version": 2}, {F + "syncModuleStates": False}, {F + "version": 1}),
        ("no-effect-reshard-after-forward", {F + "version": 1}, {F + "reshardAfterForward": False}, {F + "version": 2}),
        ("no-effect-cpu-ram-efficient-loading", {}, {F + "cpuRamEfficientLoading": True}, None),
        ("no-effect-state-dict-type", {}, {F + "stateDictType": "FULL_STATE_DICT"}, None),
        # The setting that counts is written, too: nothing is computed twice.
        (
            "no-effect-activation-checkpointing",
            {"training.activationCheckpointing": "Selective"},
            {F + "activationCheckpointing": True},
            None,
        ),
        ("lora-settings-misplaced", {"method.type": "Full"}, {"method.lora": {"r": 64}}, {"method.type": "LoRA"}),
        ("method-settings-misplaced", {"method.type": "LoRA"}, {"method.settings": {"r": 64}}, {"method.type": "LoHa"}),
        (
            "quantization-without-qlora",
            {"method.type": "LoHa"},
            {"method.quantization": {"quantType": "fp4"}},
            {"method.type": "QLoRA"},
        ),
        ("no-effect-output-secret", CLAIM, {"output.secretRef": {"name": "s"}}, {"output.destination": "s3://bucket/result"}),
        ("no-effect-output-private", CLAIM, {"output.private": False}, {"output.destination": "hf://org/model"}),
        (
            "no-effect-hub-token",
            {},
            {"fetch.hubTokenSecretRef": {"name": "hub"}},
            {"model.source": "hf://org/model", "model.revision": COMMIT},
        ),
        ("no-effect-s3-secret", {}, {"fetch.s3SecretRef": {"name": "keys"}}, {"model.source": "s3://models/llama"}),
        (
            "hub-name-with-hub-source",
            {"model.source": "hf://org/model", "model.revision": COMMIT},
            {"model.hubName": "org/other"},
            {"model.source": "pvc://models/llama", "model.revision": None},
        ),
        (
            "revision-without-hub-source",
            {},
            {"data.revision": COMMIT},
            {"data.source": "hf://datasets/org/set"},
        ),
    ],
)
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


def test_a_misplaced_rank_is_not_the_adapters():
    assert [adapter_config(plan.method).r for plan in plans("method-settings-misplaced", {"method.settings": {"r": 64}})] == [
        16,
        16,
    ]
    assert adapter_config(plan_of({"method.lora.r": 64}).method).r == 64


@pytest.mark.reproduces
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


@pytest.mark.reproduces("no-wrap-gathers-everything")
def test_without_a_policy_every_rank_gathers_all():
    changes = {f"{F}autoWrapPolicy": "NO_WRAP", "parallelism.processesPerNode": 2}
    wrong, right = plans("no-wrap-gathers-everything", changes)
    assert units(wrong) == []
    assert len(units(right)) == 2


def units(plan: RunPlan) -> list[str]:
    """Modules that the trainer makes units of their own."""
    return unit_names(attach(llama(), plan), plan.parallelism.fsdp)

"""Manifests with their verdicts beside them: for each rule one that it finds and a neighbour that it leaves alone."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_job.api.profile import FineTuneProfileSpec, GpuResource
from finetune_job.rules.book import RULES
from tests.unit.rules.manifests import PLAIN, applied, judged, manifest

CPU = FineTuneProfileSpec(trainer_image="trainer@sha256:0")
GPU = FineTuneProfileSpec(trainer_image="trainer@sha256:0", gpu=GpuResource())
TRUSTING = FineTuneProfileSpec(trainer_image="trainer@sha256:0", allow_remote_code=True)

F = "parallelism.fsdp."
V1, V2 = {F + "version": 1}, {F + "version": 2}
DORA, QLORA, FULL = {"method.type": "DoRA"}, {"method.type": "QLoRA"}, {"method.type": "Full"}
BF16 = {"model.dtype": "bfloat16"}
TEMPLATE = {"workspace.claimName": None, "workspace.volumeClaimTemplate.storage": "10Gi"}

CASES: list[tuple[str, dict[str, Any], dict[str, Any], FineTuneProfileSpec | None]] = [
    # rule, manifest that it finds, neighbour that it does not find, profile
    ("wrap-class-list-empty", {F + "transformerLayerClsToWrap": []}, {}, None),
    (
        "wrap-class-name-blank",
        {F + "transformerLayerClsToWrap": [""]},
        {F + "transformerLayerClsToWrap": ["LlamaDecoderLayer"]},
        None,
    ),
    (
        "wrap-class-name-blank",
        V1 | {F + "transformerLayerClsToWrap": ["A", " "]},
        V1 | {F + "transformerLayerClsToWrap": ["A"]},
        None,
    ),
    ("wrap-class-name-malformed", {F + "transformerLayerClsToWrap": ["A, B"]}, {F + "transformerLayerClsToWrap": ["A", "B"]}, None),
    (
        "wrap-class-name-malformed",
        {F + "transformerLayerClsToWrap": ["a.b.Layer"]},
        {F + "transformerLayerClsToWrap": ["Layer"]},
        None,
    ),
    (
        "wrap-class-without-transformer-policy",
        {F + "transformerLayerClsToWrap": ["A"], F + "autoWrapPolicy": "SIZE_BASED_WRAP"},
        {F + "transformerLayerClsToWrap": ["A"], F + "autoWrapPolicy": "TRANSFORMER_BASED_WRAP"},
        None,
    ),
    (
        "min-num-params-without-size-policy",
        {F + "minNumParams": 1000},
        {F + "minNumParams": 1000, F + "autoWrapPolicy": "SIZE_BASED_WRAP"},
        None,
    ),
    (
        "no-wrap-gathers-everything",
        {F + "autoWrapPolicy": "NO_WRAP", "parallelism.processesPerNode": 2},
        {F + "autoWrapPolicy": "NO_WRAP"},
        None,
    ),
    (
        "fsdp1-lora-mixed-requires-grad",
        V1 | {F + "useOrigParams": False, F + "peftWrapPolicy": False},
        V1 | {F + "useOrigParams": False},
        None,
    ),
    (
        "fsdp1-lora-mixed-requires-grad",
        V1 | QLORA | {F + "useOrigParams": False, F + "peftWrapPolicy": False},
        V1 | FULL | {F + "useOrigParams": False, F + "peftWrapPolicy": False},
        None,
    ),
    (
        "fsdp1-lora-mixed-requires-grad",
        V1 | {F + "useOrigParams": False, F + "peftWrapPolicy": False},
        V1 | {F + "peftWrapPolicy": False},
        None,
    ),
    ("fsdp1-trained-bias", V1 | {"method.lora.bias": "all"}, V2 | {"method.lora.bias": "all"}, None),
    (
        "fsdp1-dora-orig-params",
        V1 | DORA | {F + "useOrigParams": True, F + "peftWrapPolicy": True},
        V1 | {F + "useOrigParams": True, F + "peftWrapPolicy": True},
        None,
    ),
    (
        "fsdp1-dora-orig-params",
        V1 | DORA | {F + "useOrigParams": True, F + "peftWrapPolicy": True},
        V1 | DORA | {F + "useOrigParams": False, F + "peftWrapPolicy": True},
        None,
    ),
    (
        "fsdp1-dora-mixed-precision",
        V1 | DORA | {F + "mixedPrecision.paramDtype": "bfloat16"},
        V2 | DORA | {F + "mixedPrecision.paramDtype": "bfloat16"},
        None,
    ),
    (
        "fsdp1-dora-mixed-precision",
        V1 | DORA | {F + "mixedPrecision.paramDtype": "bfloat16", "training.precision": "bf16"},
        V1 | DORA,
        None,
    ),
    (
        "dora-16-bit-magnitude",
        DORA | BF16 | {"method.lora.autocastAdapterDtype": False},
        BF16 | {"method.lora.autocastAdapterDtype": False},
        None,
    ),
    (
        "dora-16-bit-magnitude",
        DORA | BF16 | V1 | {"method.lora.autocastAdapterDtype": False},
        DORA | BF16 | {"method.lora.autocastAdapterDtype": False, "training.precision": "fp32"},
        None,
    ),
    ("quantization-without-qlora", {"method.quantization.bits": 4}, QLORA | {"method.quantization.bits": 4}, None),
    ("quantization-without-qlora", DORA | {"method.quantization": {}}, DORA, None),
    ("quantization-bits", QLORA | {"method.quantization.bits": 8}, QLORA | {"method.quantization.bits": 4}, None),
    ("quantization-bits", QLORA | V1 | {"method.quantization.bits": 5}, QLORA | V1, None),
    (
        "fsdp1-qlora-integer-storage",
        V1 | QLORA | {"method.quantization.quantStorage": "uint8"},
        V1 | QLORA | {"method.quantization.quantStorage": "bfloat16"},
        None,
    ),
    ("fsdp2-qlora-integer-storage", V2 | QLORA | {"method.quantization.quantStorage": "uint8"}, V2 | QLORA, None),
    (
        "fsdp1-qlora-storage-not-model-dtype",
        V1 | QLORA | BF16 | {"method.quantization.quantStorage": "float32"},
        V2 | QLORA | BF16 | {"method.quantization.quantStorage": "float32"},
        None,
    ),
    (
        "fsdp1-qlora-storage-not-model-dtype",
        V1 | QLORA | BF16 | {"method.quantization.quantStorage": "bfloat16", "training.precision": "fp32"},
        V1 | QLORA | BF16 | {"method.quantization.quantStorage": "bfloat16"},
        None,
    ),
    (
        "qlora-storage-not-param-dtype",
        QLORA | {"model.dtype": "float32", F + "mixedPrecision.paramDtype": "bfloat16"},
        QLORA | BF16 | {F + "mixedPrecision.paramDtype": "bfloat16"},
        None,
    ),
    (
        "qlora-storage-not-param-dtype",
        QLORA | BF16 | {"training.precision": "bf16", "method.quantization.quantStorage": "float32"},
        QLORA | BF16 | {"training.precision": "bf16"},
        None,
    ),
    (
        "fsdp1-adapter-dtype",
        V1 | BF16 | {F + "peftWrapPolicy": False, "method.lora.autocastAdapterDtype": True},
        V1 | BF16 | {F + "peftWrapPolicy": False},
        None,
    ),
    (
        "fsdp1-adapter-dtype",
        V1 | BF16 | DORA | {F + "useOrigParams": True, "method.lora.autocastAdapterDtype": True},
        V1 | BF16 | {F + "peftWrapPolicy": False, "method.lora.autocastAdapterDtype": False},
        None,
    ),
    (
        "fsdp1-qlora-compute-dtype",
        V1
        | QLORA
        | BF16
        | {
            F + "peftWrapPolicy": False,
            "method.lora.autocastAdapterDtype": False,
            "method.quantization.computeDtype": "float32",
        },
        V1 | QLORA | BF16 | {"method.lora.autocastAdapterDtype": False, "method.quantization.computeDtype": "float32"},
        None,
    ),
    ("fsdp2-trained-bias-dtype", V2 | BF16 | {"method.lora.bias": "all"}, V1 | BF16 | {"method.lora.bias": "all"}, None),
    ("float16-without-loss-scaling", {"model.dtype": "float16"}, {"model.dtype": "float16", "training.precision": "fp32"}, None),
    (
        "float16-without-loss-scaling",
        QLORA | {F + "mixedPrecision.paramDtype": "float16", "method.quantization.quantStorage": "float16"},
        {"model.dtype": "float16", "training.precision": "bf16"},
        None,
    ),
    ("local-state-dict", {F + "stateDictType": "LOCAL_STATE_DICT"}, {F + "stateDictType": "SHARDED_STATE_DICT"}, None),
    ("no-effect-peft-wrap-policy", V2 | {F + "peftWrapPolicy": False}, V1 | {F + "peftWrapPolicy": True}, None),
    ("no-effect-use-orig-params", {F + "useOrigParams": True}, V1 | {F + "useOrigParams": True}, None),
    ("no-effect-sync-module-states", V2 | {F + "syncModuleStates": True}, V1 | {F + "syncModuleStates": True}, None),
    ("no-effect-reshard-after-forward", V1 | {F + "reshardAfterForward": True}, V2 | {F + "reshardAfterForward": False}, None),
    ("no-effect-cpu-ram-efficient-loading", {F + "cpuRamEfficientLoading": True}, {}, None),
    ("no-effect-state-dict-type", {F + "stateDictType": "FULL_STATE_DICT"}, {F + "stateDictType": "LOCAL_STATE_DICT"}, None),
    ("no-effect-activation-checkpointing", {F + "activationCheckpointing": True}, {F + "activationCheckpointing": False}, None),
    (
        "global-batch-not-divisible",
        {"training.globalBatchSize": 10, "parallelism.processesPerNode": 4},
        {"training.globalBatchSize": 12, "parallelism.processesPerNode": 4},
        None,
    ),
    (
        "global-batch-not-divisible",
        {"training.globalBatchSize": 12, "parallelism.processesPerNode": 2, "training.microBatchSize": 4},
        {"training.globalBatchSize": 12, "parallelism.processesPerNode": 2, "training.microBatchSize": 3},
        None,
    ),
    (
        "nodes-need-read-write-many",
        TEMPLATE | {"parallelism.nodes": 2},
        TEMPLATE | {"parallelism.nodes": 2, "workspace.volumeClaimTemplate.accessMode": "ReadWriteMany"},
        None,
    ),
    ("nodes-need-read-write-many", TEMPLATE | {"parallelism.nodes": 2}, TEMPLATE, None),
    ("offload-without-gpu", {F + "offloadParams": True}, {F + "offloadParams": False}, CPU),
    ("adapter-settings-with-full", FULL | {"method.lora.r": 8}, {"method.lora.r": 8}, None),
    ("lora-dropout-range", {"method.lora.loraDropout": "1"}, {"method.lora.loraDropout": "0.99"}, None),
    (
        "all-linear-beside-names",
        {"method.lora.targetModules": ["all-linear", "q"]},
        {"method.lora.targetModules": ["all-linear"]},
        None,
    ),
    ("module-name-malformed", {"method.lora.targetModules": ["q k"]}, {"method.lora.targetModules": ["q", "k"]}, None),
    ("module-name-malformed", {"method.lora.modulesToSave": [""]}, {"method.lora.modulesToSave": ["lm_head"]}, None),
    (
        "module-adapted-and-saved",
        {"method.lora.targetModules": ["q", "lm_head"], "method.lora.modulesToSave": ["lm_head"]},
        {"method.lora.targetModules": ["q"], "method.lora.modulesToSave": ["lm_head"]},
        None,
    ),
    (
        "adapter-pattern-malformed",
        {"method.lora.rankPattern": {"(q": 8}, "method.lora.alphaPattern": {"": 8}},
        {"method.lora.rankPattern": {"layers\\.0\\..*": 8}},
        None,
    ),
    (
        "rslora-with-alpha",
        {"method.lora.useRslora": True, "method.lora.loraAlpha": 32, "method.lora.r": 16},
        {"method.lora.loraAlpha": 32, "method.lora.r": 16},
        None,
    ),
    ("epochs-or-max-steps", {"training.epochs": 1}, {}, None),
    ("epochs-or-max-steps", {"training.maxSteps": None}, {"training.maxSteps": None, "training.epochs": 1}, None),
    ("warmup-ratio-range", {"training.warmupRatio": "1.0"}, {"training.warmupRatio": "0.5"}, None),
    ("learning-rate-zero", {"training.learningRate": "0e0"}, {"training.learningRate": "1e-9"}, None),
    (
        "both-activation-checkpointings",
        {F + "activationCheckpointing": True, "training.activationCheckpointing": "Full"},
        {"training.activationCheckpointing": "Full"},
        None,
    ),
    (
        "evaluation-without-validation",
        {"evaluation.everySteps": 5},
        {"evaluation.everySteps": 5, "data.validation.source": "pvc://data/held-out.jsonl"},
        None,
    ),
    (
        "completion-loss-on-text",
        {"data.format": "Text", "data.lossOn": "Completion"},
        {"data.format": "Text", "data.lossOn": "All"},
        None,
    ),
    ("merge-dtype-overflow", BF16 | {"merge.dtype": "float16"}, {"model.dtype": "float16", "merge.dtype": "float16"}, None),
    ("verification-agreement-range", {"merge.verify.minTop1Agreement": "1.01"}, {"merge.verify.minTop1Agreement": "1"}, None),
    ("merge-into-quantized", QLORA | {"merge.base": "Quantized"}, QLORA, None),
    ("merge-while-sharded", {"merge.base": "Trained"}, {"merge.base": "Trained", "merge.enabled": False}, None),
    ("merge-device-mismatch", QLORA | {"merge.base": "Trained"}, {"merge.base": "Quantized"}, None),
    (
        "output-inside-input",
        {"output.destination": "pvc://models/base/tuned"},
        {"output.destination": "pvc://models/base-tuned"},
        None,
    ),
    ("output-inside-input", {"output.destination": "pvc://models/base"}, {"output.destination": "pvc://other/base"}, None),
    ("workspace-claim-or-template", {"workspace.claimName": None}, TEMPLATE, None),
    ("workspace-claim-or-template", {"workspace.volumeClaimTemplate.storage": "1Gi"}, {}, None),
    ("retain-with-named-claim", {"workspace.retain": "Delete"}, TEMPLATE | {"workspace.retain": "Delete"}, None),
    ("remote-code-not-allowed", {"model.allowRemoteCode": True}, {"model.allowRemoteCode": False}, CPU),
]


def ids(spec: dict[str, Any], profile: FineTuneProfileSpec | None) -> set[str]:
    return {finding.rule for finding in judged(spec, profile)}


@pytest.mark.parametrize(("rule", "bad", "good", "profile"), CASES, ids=[f"{case[0]}-{n}" for n, case in enumerate(CASES)])
def test_the_rule_finds_one_and_leaves_its_neighbour(rule, bad, good, profile):
    assert rule in ids(manifest(bad), profile)
    assert rule not in ids(manifest(good), profile)


@pytest.mark.parametrize(("rule", "bad", "good", "profile"), CASES, ids=[f"{case[0]}-{n}" for n, case in enumerate(CASES)])
def test_the_fix_clears_the_finding_and_brings_no_new_error(rule, bad, good, profile):
    before = judged(manifest(bad), profile)
    finding = next(finding for finding in before if finding.rule == rule)
    assert finding.changes
    after = judged(applied(manifest(bad), finding.changes), profile)
    assert rule not in {each.rule for each in after}
    known = {each.rule for each in before}
    assert not [each for each in after if each.severity == "error" and each.rule not in known]


def test_every_rule_has_a_case():
    assert {case[0] for case in CASES} == {rule.id for rule in RULES}


def test_a_finding_names_field_value_reason_and_fix():
    for rule, bad, _, profile in CASES:
        finding = next(finding for finding in judged(manifest(bad), profile) if finding.rule == rule)
        book = next(each for each in RULES if each.id == rule)
        assert finding.field in book.reads
        assert finding.severity == book.severity
        assert finding.value
        assert finding.message
        assert finding.fix


def test_the_plain_manifest_is_accepted_without_a_word():
    for profile in (None, CPU, GPU, TRUSTING):
        for method in ("LoRA", "QLoRA", "DoRA", "Full"):
            for version in (1, 2):
                assert not judged(
                    applied(PLAIN, []) | {"method": {"type": method}, "parallelism": {"fsdp": {"version": version}}}, profile
                )


def test_profiles_that_allow_are_respected():
    assert not judged(manifest({"model.allowRemoteCode": True}), TRUSTING)
    assert not judged(manifest({"model.allowRemoteCode": True}), None)
    assert not judged(manifest({F + "offloadParams": True}), GPU)


def test_errors_come_first():
    found = judged(manifest({F + "useOrigParams": True, "training.epochs": 1, F + "transformerLayerClsToWrap": []}))
    assert [finding.severity for finding in found] == ["error", "error", "warning"]


def test_every_finding_is_reported():
    found = judged(
        manifest(V1 | DORA | {F + "transformerLayerClsToWrap": [""], F + "useOrigParams": True, F + "peftWrapPolicy": True})
    )
    assert {finding.rule for finding in found} == {"wrap-class-name-blank", "fsdp1-dora-orig-params"}

"""Manifests with their verdicts next to them: for each rule one that it finds and a neighbour that it leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from finetune_job.api.profile import FetchSettings, FineTuneProfileSpec, GpuResource, JobLimits, PublishSettings
from finetune_job.finding import FieldChange, Finding
from finetune_job.rules.book import RULES
from finetune_job.rules.rule import changes_text, yaml_text
from tests.unit.finetune_job.rules.manifests import PLAIN, applied, judged, manifest

CPU = FineTuneProfileSpec(trainer_image="trainer@sha256:0")
GPU = FineTuneProfileSpec(trainer_image="trainer@sha256:0", gpu=GpuResource())
LIMITED = FineTuneProfileSpec(
    trainer_image="trainer@sha256:0",
    gpu=GpuResource(),
    limits=JobLimits(nodes=2, gpus=8, storage="100Gi", active_deadline_seconds=3600, max_restarts=1),
)
REHEARSING = FineTuneProfileSpec(trainer_image="trainer@sha256:0", require_rehearsal=True)
TRUSTING = FineTuneProfileSpec(trainer_image="trainer@sha256:0", allow_remote_code=True)
OPEN = FineTuneProfileSpec(
    trainer_image="trainer@sha256:0",
    fetch=FetchSettings(allowed_sources=["hf://", "s3://"]),
    publish=PublishSettings(allowed_destinations=["hf://", "s3://", "oci://"]),
)
CLOSED = FineTuneProfileSpec(trainer_image="trainer@sha256:0")
FENCED = FineTuneProfileSpec(
    trainer_image="trainer@sha256:0",
    fetch=FetchSettings(allowed_sources=["hf://our-org", "hf://datasets/our-org/set/", "s3://ours/a"]),
)
ONE_REPOSITORY = FineTuneProfileSpec(
    trainer_image="trainer@sha256:0", publish=PublishSettings(allowed_destinations=["hf://our-org/tuned"])
)
NO_WAY_OUT = FineTuneProfileSpec(trainer_image="trainer@sha256:0", publish=PublishSettings(allowed_destinations=[]))
GATED = FineTuneProfileSpec(
    trainer_image="trainer@sha256:0",
    publish=PublishSettings(
        allowed_destinations=["hf://our-org", "oci://registry.test:5000/team", "oci://other/a/b:v1", "s3://ours/a"]
    ),
)
IN_CLEAR = FineTuneProfileSpec(
    trainer_image="trainer@sha256:0",
    publish=PublishSettings(
        hub_endpoint="http://hub.test",
        plain_http_registries=["registry.test:5000"],
        allowed_destinations=["hf://", "s3://", "oci://"],
    ),
)
TWO_STORES = OPEN.model_copy(
    update={"publish": PublishSettings(s3_endpoint="https://store.test", allowed_destinations=["s3://"])},
)
TWO_HUBS = OPEN.model_copy(update={"publish": PublishSettings(hub_endpoint="https://hub.test", allowed_destinations=["hf://"])})
WITHIN = {"run.activeDeadlineSeconds": 3600, "run.maxRestarts": 1, "training.globalBatchSize": 720}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB_MODEL = {"model.source": "hf://our-org/llama", "model.revision": COMMIT}
HUB_DATA = {"data.source": "hf://datasets/our-org/set", "data.revision": COMMIT}
BUCKET_DATA = {"data.source": "s3://ours/a/train.jsonl"}


def hub_sets(*sources: str, **more: str) -> dict[str, Any]:
    return {"data.source": None, "data.datasets": [{"source": source, **more} for source in sources]}


F = "parallelism.fsdp."
CHAT, SETS = {"data.format": "Chat"}, hub_sets("pvc://data/a.jsonl", "pvc://data/b")
TWO = {"parallelism.processesPerNode": 2}
PEFTS, FLAT = {F + "peftWrapPolicy": True, "model.dtype": "float32"}, {F + "useOrigParams": False}
UNPARTED = {F + "peftWrapPolicy": False}
WIDE = {"method.lora.autocastAdapterDtype": True, F + "useOrigParams": True}
V1, V2 = TWO | {F + "version": 1}, TWO | {F + "version": 2}
LOHA, ALONE = {"method.type": "LoHa", "merge.enabled": False}, {"merge.enabled": False}
ORDERED = {"training.reduction": "Ordered"}
MIN_NODES = "parallelism.elastic.minNodes"
ELASTIC = {"parallelism.nodes": 2, MIN_NODES: 1}
DORA, QLORA, FULL = {"method.type": "DoRA"}, {"method.type": "QLoRA"}, {"method.type": "Full"}
SGD = {"training.optimizer": "SGD"}
RATE = "training.learningRate"
NEARLY_1 = "0.99999999999999999999"
"""The nearest float, with which everything is computed, is 1."""
DECAY = {"training.scheduler": "WarmupStableDecay"}
HALVES = {"training.warmupRatio": "0.5", "training.decayRatio": "0.5"}
EPOCHS = {"training.maxSteps": None, "training.epochs": 1}
HELD_OUT = {"data.validation.source": "pvc://data/held-out.jsonl"}
STOPPING, BEST = {"evaluation.earlyStopping.patience": 2}, {"evaluation.loadBestModelAtEnd": True}
BF16 = {"model.dtype": "bfloat16"}
NORM, AS_BASE = {"method.lora.modulesToSave": ["norm"]}, {"method.lora.autocastAdapterDtype": False}
START = {"training.startFrom": "other-0a1b2c3d/checkpoints/step-0000000100"}
TEMPLATE = {"workspace.claimName": None, "workspace.volumeClaimTemplate.storage": "10Gi"}
DELETED = TEMPLATE | {"workspace.retain": "Delete"}
OWN_CLAIM = {"output.destination": "pvc://tuned-workspace/results"}
"""Of the workspace that a job of that name makes."""

Q = {"targetModules": ["q_proj"]}
TOKENS = {"method.lora.trainableTokenIndices": [3]}
TOOL = {"content": "<a>"}
ADDED = {"model.addedTokens": [TOOL]}
SAVED = {"method.lora.modulesToSave": ["embed_tokens"]}
EXPERTS = {"method.lora.targetParameters": ["mlp.experts.down_proj"]}


def settings(method: str, **written: Any) -> dict[str, Any]:
    return {"method.type": method, "method.settings": written}


def lora(**written: Any) -> dict[str, Any]:
    return {"method.lora": written}


TO_HUB, TO_REGISTRY = {"output.destination": "hf://our-org/tuned"}, {"output.destination": "oci://registry.test:5000/team/a/b:v1"}
TO_BUCKET = {"output.destination": "s3://ours/tuned"}
WRITER = {"output.secretRef.name": "writer"}

CASES: list[tuple[str, dict[str, Any], dict[str, Any], FineTuneProfileSpec | None]] = [
    # rule, manifest that it finds, neighbour that it does not find, profile
    ("wrap-class-list-empty", {F + "transformerLayerClsToWrap": []}, {}, None),
    ("wrap-class-name-blank", {F + "transformerLayerClsToWrap": [""]}, {F + "transformerLayerClsToWrap": ["LlamaDecoderLayer"]}, None),
    ("wrap-class-name-blank", V1 | {F + "transformerLayerClsToWrap": ["A", " "]}, V1 | {F + "transformerLayerClsToWrap": ["A"]}, None),
    ("wrap-class-name-malformed", {F + "transformerLayerClsToWrap": ["A, B"]}, {F + "transformerLayerClsToWrap": ["A", "B"]}, None),
    ("wrap-class-name-malformed", {F + "transformerLayerClsToWrap": ["a.b.Layer"]}, {F + "transformerLayerClsToWrap": ["Layer"]}, None),
    ("wrap-class-without-transformer-policy", {F + "transformerLayerClsToWrap": ["A"], F + "autoWrapPolicy": "SIZE_BASED_WRAP"}, {F + "transformerLayerClsToWrap": ["A"], F + "autoWrapPolicy": "TRANSFORMER_BASED_WRAP"}, None),
    ("min-num-params-without-size-policy", {F + "minNumParams": 1000}, {F + "minNumParams": 1000, F + "autoWrapPolicy": "SIZE_BASED_WRAP"}, None),
    ("no-wrap-gathers-everything", {F + "autoWrapPolicy": "NO_WRAP", "parallelism.processesPerNode": 2}, {F + "autoWrapPolicy": "NO_WRAP"}, None),
    ("fsdp1-lora-mixed-requires-grad", V1 | {F + "useOrigParams": False, F + "peftWrapPolicy": False}, V1 | {F + "useOrigParams": False}, None),
    ("fsdp1-lora-mixed-requires-grad", V1 | QLORA | {F + "useOrigParams": False, F + "peftWrapPolicy": False}, V1 | FULL | {F + "useOrigParams": False, F + "peftWrapPolicy": False}, None),
    ("fsdp1-lora-mixed-requires-grad", V1 | {F + "useOrigParams": False, F + "peftWrapPolicy": False}, V1 | {F + "peftWrapPolicy": False}, None),
    ("fsdp1-trained-bias", V1 | {"method.lora.bias": "all"}, V2 | {"method.lora.bias": "all"}, None),
    ("fsdp1-dora-orig-params", V1 | DORA | {F + "useOrigParams": True, F + "peftWrapPolicy": True}, V1 | {F + "useOrigParams": True, F + "peftWrapPolicy": True}, None),
    ("fsdp1-dora-orig-params", V1 | DORA | {F + "useOrigParams": True, F + "peftWrapPolicy": True}, V1 | DORA | {F + "useOrigParams": False, F + "peftWrapPolicy": True}, None),
    ("dora-16-bit-magnitude", DORA | BF16 | {"method.lora.autocastAdapterDtype": False}, BF16 | {"method.lora.autocastAdapterDtype": False}, None),
    ("dora-16-bit-magnitude", DORA | BF16 | V1 | {"method.lora.autocastAdapterDtype": False}, DORA | BF16 | {"method.lora.autocastAdapterDtype": False, "training.precision": "fp32"}, None),
    ("quantization-without-qlora", {"method.quantization.bits": 4}, QLORA | {"method.quantization.bits": 4}, None),
    ("quantization-without-qlora", DORA | {"method.quantization": {}}, DORA, None),
    ("quantization-without-qlora", V1 | {"method.quantization": {"bits": 8, "quantStorage": "uint8"}}, V1 | QLORA | {"method.quantization": {"bits": 4}}, None),
    ("quantization-bits", TWO | QLORA | {"method.quantization.bits": 8}, QLORA | {"method.quantization.bits": 8}, None),
    ("quantization-bits", QLORA | {"method.quantization.bits": 8, "merge.base": "Dequantized"}, QLORA | {"method.quantization.bits": 4, "merge.base": "Dequantized"}, None),
    ("quantization-bits", QLORA | V1 | {"method.quantization.bits": 5}, QLORA | V1, None),
    ("fsdp1-qlora-integer-storage", V1 | QLORA | {"method.quantization.quantStorage": "uint8"}, V1 | QLORA | {"method.quantization.quantStorage": "bfloat16"}, None),
    ("fsdp2-qlora-integer-storage", V2 | QLORA | {"method.quantization.quantStorage": "uint8"}, V2 | QLORA, None),
    ("fsdp1-qlora-storage-not-model-dtype", V1 | QLORA | BF16 | {"method.quantization.quantStorage": "float32"}, V2 | QLORA | BF16 | {"method.quantization.quantStorage": "float32"}, None),
    ("fsdp1-qlora-storage-not-model-dtype", V1 | QLORA | BF16 | {"method.quantization.quantStorage": "bfloat16", "training.precision": "fp32"}, V1 | QLORA | BF16 | {"method.quantization.quantStorage": "bfloat16"}, None),
    ("qlora-storage-not-param-dtype", V2 | QLORA | BF16 | {F + "mixedPrecision.paramDtype": "float32", "method.quantization.quantStorage": "bfloat16"}, V1 | QLORA | BF16 | {F + "mixedPrecision.paramDtype": "float32"}, None),
    ("qlora-storage-not-param-dtype", TWO | QLORA | BF16 | {"training.precision": "bf16", "method.quantization.quantStorage": "float32"}, V2 | QLORA | {"model.dtype": "float32", F + "mixedPrecision.paramDtype": "bfloat16"}, None),
    ("fsdp1-adapter-dtype", V1 | BF16 | {F + "peftWrapPolicy": False, "method.lora.autocastAdapterDtype": True}, V1 | BF16 | {F + "peftWrapPolicy": False}, None),
    ("fsdp1-adapter-dtype", V1 | BF16 | UNPARTED | WIDE, V1 | BF16 | UNPARTED | WIDE | {F + "mixedPrecision.paramDtype": "float32"}, None),
    ("fsdp1-adapter-dtype", V1 | BF16 | DORA | {F + "useOrigParams": True, "method.lora.autocastAdapterDtype": True}, V1 | BF16 | {F + "peftWrapPolicy": False, "method.lora.autocastAdapterDtype": False}, None),
    ("fsdp1-qlora-compute-dtype", V1 | QLORA | BF16 | {F + "peftWrapPolicy": False, "method.lora.autocastAdapterDtype": False, "method.quantization.computeDtype": "float32"}, V1 | QLORA | BF16 | {"method.lora.autocastAdapterDtype": False, "method.quantization.computeDtype": "float32"}, None),
    ("float16-adapter", {"model.dtype": "float16", "method.lora.autocastAdapterDtype": False}, {"model.dtype": "float16", "method.lora.autocastAdapterDtype": False, "training.optimizer": "SGD"}, None),
    ("float16-adapter", V1 | {"model.dtype": "float16", "method.lora.autocastAdapterDtype": False, F + "peftWrapPolicy": False}, V1 | {"model.dtype": "float16"}, None),
    ("saved-module-16-bit", BF16 | NORM | AS_BASE, BF16 | NORM, None),
    ("saved-module-16-bit", QLORA | BF16 | NORM | AS_BASE, BF16 | AS_BASE, None),
    ("float16-range", {"model.dtype": "float16"}, {"model.dtype": "float16", "training.precision": "fp32"}, None),
    ("float16-range", QLORA | {F + "mixedPrecision.paramDtype": "float16", "method.quantization.quantStorage": "float16"}, {"model.dtype": "float16", "training.precision": "bf16"}, None),
    ("local-state-dict", {F + "stateDictType": "LOCAL_STATE_DICT"}, {F + "stateDictType": "SHARDED_STATE_DICT"}, None),
    ("no-effect-peft-wrap-policy", V2 | {F + "peftWrapPolicy": False}, V1 | {F + "peftWrapPolicy": True}, None),
    ("no-effect-use-orig-params", {F + "useOrigParams": True}, V1 | {F + "useOrigParams": True}, None),
    ("no-effect-sync-module-states", V2 | {F + "syncModuleStates": True}, V1 | {F + "syncModuleStates": True}, None),
    ("no-effect-reshard-after-forward", V1 | {F + "reshardAfterForward": True}, V2 | {F + "reshardAfterForward": False}, None),
    ("no-effect-cpu-ram-efficient-loading", {F + "cpuRamEfficientLoading": True}, {}, None),
    ("no-effect-state-dict-type", {F + "stateDictType": "FULL_STATE_DICT"}, {F + "stateDictType": "LOCAL_STATE_DICT"}, None),
    ("no-effect-activation-checkpointing", {F + "activationCheckpointing": True}, {F + "activationCheckpointing": False}, None),
    ("global-batch-not-divisible", {"training.globalBatchSize": 10, "parallelism.processesPerNode": 4}, {"training.globalBatchSize": 12, "parallelism.processesPerNode": 4}, None),
    ("global-batch-not-divisible", {"training.globalBatchSize": 12, "parallelism.processesPerNode": 2, "training.microBatchSize": 4}, {"training.globalBatchSize": 12, "parallelism.processesPerNode": 2, "training.microBatchSize": 3}, None),
    ("nodes-need-read-write-many", TEMPLATE | {"parallelism.nodes": 2}, TEMPLATE | {"parallelism.nodes": 2, "workspace.volumeClaimTemplate.accessMode": "ReadWriteMany"}, None),
    ("nodes-need-read-write-many", TEMPLATE | {"parallelism.nodes": 2}, TEMPLATE, None),
    ("adam-beta-range", {"training.adamBeta1": "0.9", "training.adamBeta2": "1"}, {"training.adamBeta2": "0.95"}, None),
    ("adam-beta-range", {"training.adamBeta1": "1.5"}, {"training.adamBeta1": "0"}, None),
    ("adam-beta-range", {"training.adamBeta2": NEARLY_1}, {"training.adamBeta2": "0.9999999999"}, None),
    ("momentum-range", SGD | {"training.momentum": NEARLY_1}, SGD | {"training.momentum": "0.9999999999"}, None),
    ("warmup-ratio-range", {"training.warmupRatio": NEARLY_1}, {"training.warmupRatio": "0.99"}, None),
    ("lora-dropout-range", lora(loraDropout=NEARLY_1), lora(loraDropout="0.99"), None),
    ("adam-epsilon-zero", {"training.adamEpsilon": "1e-50"}, {"training.adamEpsilon": "1e-16"}, None),
    ("momentum-range", SGD | {"training.momentum": "1"}, SGD | {"training.momentum": "0"}, None),
    ("no-effect-momentum", {"training.momentum": "0.9"}, SGD | {"training.momentum": "0.9"}, None),
    ("no-effect-adam-settings", SGD | {"training.adamEpsilon": "1e-6"}, {"training.adamEpsilon": "1e-6"}, None),
    ("offload-without-gpu", {F + "offloadParams": True}, {F + "offloadParams": False}, CPU),
    ("lora-settings-misplaced", FULL | {"method.lora.r": 8}, {"method.lora.r": 8}, None),
    ("lora-settings-misplaced", LOHA | {"method.lora.r": 8}, LOHA | {"method.settings.r": 8}, None),
    ("method-settings-misplaced", {"method.settings.r": 8}, LOHA | {"method.settings.r": 8}, None),
    ("method-settings-misplaced", FULL | {"method.settings.r": 8}, FULL, None),
    ("method-not-supported", {"method.type": "AdaLoRA"} | ALONE, LOHA, None),
    ("method-not-supported", {"method.type": "PromptTuning", "method.settings.numVirtualTokens": 4}, LOHA, None),
    ("method-not-supported", {"method.type": "Lily"} | ALONE | {"merge.enabled": False}, LOHA, None),
    ("method-not-supported", {"method.type": "FRoD"}, LOHA, None),
    ("method-not-supported", {"method.type": "FourierFT", "method.settings.nFrequency": 8}, LOHA, None),
    ("fsdp1-adapter-unit", V1 | LOHA | {F + "peftWrapPolicy": True}, V1 | LOHA, None),
    ("fsdp1-adapter-unit", V1 | LOHA | {F + "useOrigParams": False}, V1 | {F + "useOrigParams": False}, None),
    ("fsdp1-adapter-16-bit", V1 | LOHA | BF16, V1 | LOHA | BF16 | {"training.precision": "fp32"}, None),
    ("compile-with-selective-checkpointing", {"training.compile": True, "training.activationCheckpointing": "Selective"}, {"training.compile": True, "training.activationCheckpointing": "Full"}, None),
    *(
        ("ordered-reduction-not-possible", V2 | ORDERED | beyond, V2 | ORDERED | near, None)
        for beyond, near in (
            (FULL, QLORA),
            ({"method.type": "IA3"}, DORA),
            (lora(bias="lora_only"), lora(bias="none")),
            (lora(modulesToSave=["lm_head"]), lora(targetModules=["q_proj"])),
            (lora(trainableTokenIndices=[3]), {}),
            ({F + "version": 1}, {F + "reshardAfterForward": True}),
            (QLORA | {"method.quantization.bits": 8}, QLORA | {"method.quantization.bits": 4}),
        )
    ),
    # One rank adds up nothing of others, whatever shards it.
    ("ordered-reduction-not-possible", V1 | ORDERED, V1 | ORDERED | {"parallelism.processesPerNode": 1}, None),
    ("elastic-needs-ordered-reduction", ELASTIC, ELASTIC | ORDERED, None),
    ("elastic-min-nodes-above-nodes", ELASTIC | ORDERED | {MIN_NODES: 3}, ELASTIC | ORDERED | {MIN_NODES: 2}, None),
    ("lora-init-not-supported", {"method.lora.initLoraWeights": "corda"}, {"method.lora.initLoraWeights": "pissa"}, None),
    ("lora-init-not-supported", {"method.lora.initLoraWeights": "loftq"}, {"method.lora.initLoraWeights": "olora"}, None),
    ("lora-init-not-supported", {"method.lora.initLoraWeights": "eva"}, {"method.lora.initLoraWeights": "orthogonal"}, None),
    ("decomposed-start-with-dora", DORA | lora(initLoraWeights="olora"), DORA | lora(initLoraWeights="ZeroB"), None),
    ("decomposed-start-with-dora", DORA | lora(initLoraWeights="pissa_niter_4"), lora(initLoraWeights="pissa"), None),
    ("layers-without-targets", {"method.lora.layersToTransform": [0]}, {"method.lora.layersToTransform": [0], "method.lora.targetModules": ["q_proj"]}, None),
    ("lora-plus-ratio-range", {"method.lora.loraPlusRatio": "0.5"}, {"method.lora.loraPlusRatio": "16"}, None),
    ("lora-dropout-range", {"method.lora.loraDropout": "1"}, {"method.lora.loraDropout": "0.99"}, None),
    ("all-linear-beside-names", {"method.lora.targetModules": ["all-linear", "q"]}, {"method.lora.targetModules": ["all-linear"]}, None),
    ("module-name-malformed", {"method.lora.targetModules": ["q k"]}, {"method.lora.targetModules": ["q", "k"]}, None),
    ("module-name-malformed", {"method.lora.modulesToSave": [""]}, {"method.lora.modulesToSave": ["lm_head"]}, None),
    ("module-adapted-and-saved", {"method.lora.targetModules": ["q", "lm_head"], "method.lora.modulesToSave": ["lm_head"]}, {"method.lora.targetModules": ["q"], "method.lora.modulesToSave": ["lm_head"]}, None),
    ("adapter-pattern-malformed", {"method.lora.rankPattern": {"(q": 8}, "method.lora.alphaPattern": {"": 8}}, {"method.lora.rankPattern": {"layers\\.0\\..*": 8}}, None),
    ("rslora-with-alpha", {"method.lora.useRslora": True, "method.lora.loraAlpha": 32, "method.lora.r": 16}, {"method.lora.loraAlpha": 32, "method.lora.r": 16}, None),
    ("epochs-or-max-steps", {"training.epochs": 1}, {}, None),
    ("epochs-or-max-steps", {"training.maxSteps": None}, {"training.maxSteps": None, "training.epochs": 1}, None),
    ("warmup-ratio-range", {"training.warmupRatio": "1.0"}, {"training.warmupRatio": "0.5"}, None),
    ("decay-ratio-range", DECAY | {"training.decayRatio": "1.01"}, DECAY | {"training.decayRatio": "1"}, None),
    ("min-learning-rate-ratio-range", {"training.minLearningRateRatio": "1.5"}, {"training.minLearningRateRatio": "1"}, None),
    ("no-effect-decay-ratio", {"training.decayRatio": "0.1"}, DECAY | {"training.decayRatio": "0.1"}, None),
    ("no-effect-min-learning-rate-ratio", {"training.minLearningRateRatio": "0.1", "training.scheduler": "Constant"}, {"training.minLearningRateRatio": "0.1"}, None),
    ("early-stopping-without-evaluation", STOPPING | HELD_OUT, STOPPING | HELD_OUT | {"evaluation.everySteps": 5}, None),
    ("early-stopping-without-evaluation", STOPPING | {"evaluation.everySteps": 5}, STOPPING | HELD_OUT | {"evaluation.everySteps": 5}, None),
    ("best-model-without-validation", BEST | {"evaluation.everySteps": 5}, BEST | HELD_OUT | {"evaluation.everySteps": 5}, None),
    ("best-model-is-the-last", BEST | HELD_OUT, BEST | HELD_OUT | {"evaluation.everySteps": 5}, None),
    ("best-model-is-the-last", BEST | HELD_OUT, HELD_OUT, None),
    ("best-model-is-the-last", BEST | HELD_OUT | {"evaluation.everySteps": 10}, BEST | HELD_OUT | {"evaluation.everySteps": 9}, None),
    ("early-stopping-after-the-end", STOPPING | HELD_OUT | {"evaluation.everySteps": 5, "training.maxSteps": 15}, STOPPING | HELD_OUT | {"evaluation.everySteps": 5, "training.maxSteps": 16}, None),
    ("early-stopping-after-the-end", STOPPING | HELD_OUT | {"evaluation.everySteps": 1, "training.maxSteps": 2}, STOPPING | HELD_OUT | {"evaluation.everySteps": 1, "training.maxSteps": None, "training.epochs": 1}, None),
    ("learning-rate-zero", {"training.learningRate": "0e0"}, {"training.learningRate": "1e-9"}, None),
    ("verification-divergence-zero", {"merge.verify.maxKlDivergence": "1e-20"}, {"merge.verify.maxKlDivergence": "1e-12"}, None),
    ("training-moves-nothing", {"training.maxGradNorm": "1e-18"}, {"training.maxGradNorm": "1e-9"}, None),
    ("training-moves-nothing", {"training.learningRate": "1e-30"}, {"training.learningRate": "1e-9"}, None),
    ("training-moves-nothing", {"training.learningRate": "1e-20"} | EPOCHS, {"training.learningRate": "1e-9"} | EPOCHS, None),
    ("training-moves-nothing", FULL | {"training.maxGradNorm": "1e-30"}, FULL | {"training.maxGradNorm": "1e-9"}, None),
    ("training-moves-nothing", {"training.adamEpsilon": "1e15"}, {"training.adamEpsilon": "1"}, None),
    ("training-moves-nothing", SGD | {"training.maxGradNorm": "1e-15"}, SGD | {"training.maxGradNorm": "0"}, None),
    ("training-moves-nothing", {"training.optimizer": "RAdam", "training.maxGradNorm": "1e-30"}, {"training.optimizer": "RAdam", "training.adamEpsilon": "1e15"}, None),
    ("steps-too-large", {"training.learningRate": "50"}, {"training.learningRate": "1e-2"}, None),
    ("steps-too-large", {"training.learningRate": "1"}, {"training.learningRate": "1", "training.optimizer": "SGD"}, None),
    ("steps-too-large", {"method.type": "Full", "method.lora": None, "training.learningRate": "0.1"}, {"method.type": "Full", "method.lora": None, "training.learningRate": "0.09"}, None),
    ("steps-too-large", {"method.lora.r": 1, "method.lora.loraAlpha": 65536, "training.learningRate": "2e-4"}, {"method.lora.r": 256, "method.lora.loraAlpha": 512, "training.learningRate": "2e-4"}, None),
    ("steps-too-large", {"method.lora.r": 1, "method.lora.alphaPattern": {"q_proj": 65536}, "training.learningRate": "2e-4"}, {"method.lora.r": 1, "method.lora.alphaPattern": {"q_proj": 4}, "training.learningRate": "2e-4"}, None),
    ("steps-too-large", {"method.lora.r": 64, "method.lora.loraAlpha": 65536, "method.lora.rankPattern": {"q_proj": 1}}, {"method.lora.r": 64, "method.lora.loraAlpha": 128, "method.lora.rankPattern": {"q_proj": 1}}, None),
    # A pattern's alpha over the pattern's own rank, not over that of others.
    ("steps-too-large", {"method.lora.r": 64, "method.lora.rankPattern": {"q_proj": 1}, "method.lora.alphaPattern": {"q_proj": 8192}}, {"method.lora.r": 1, "method.lora.rankPattern": {"q_proj": 4096}, "method.lora.alphaPattern": {"q_proj": 8192}}, None),
    ("steps-too-large", {"method.type": "LoHa", "method.lora": None, "method.settings": {"r": 1, "alpha": 65536}}, {"method.type": "LoHa", "method.lora": None, "method.settings": {"r": 1, "alpha": 1024}}, None),
    # PEFT's rank is 8 if none is written.
    ("steps-too-large", {"method.type": "LoKr", "method.lora": None, "method.settings": {"alpha": 65536}, "training.learningRate": "1e-3"}, {"method.type": "LoKr", "method.lora": None, "method.settings": {"alpha": 65536}, "training.learningRate": "1e-4"}, None),
    ("learning-rate-unusual", {"training.learningRate": "0.02"}, {"training.learningRate": "1e-2"}, None),
    ("learning-rate-unusual", {"training.learningRate": "0.3"}, {"training.learningRate": "0.5"}, None),  # that one overwrites
    ("learning-rate-unusual", {"method.type": "Full", "method.lora": None, "training.learningRate": "0.05"}, {"method.type": "Full", "method.lora": None, "training.learningRate": "1e-3"}, None),
    ("learning-rate-unusual", {"training.learningRate": "101", "training.optimizer": "SGD"}, {"training.learningRate": "100", "training.optimizer": "SGD"}, None),
    # A thousandth of the least usual rate is the bound below.
    ("learning-rate-unusual", EPOCHS | {RATE: "9.9e-9"}, EPOCHS | {RATE: "1e-8"}, None),
    ("learning-rate-unusual", EPOCHS | {RATE: "1e-12"}, EPOCHS | {RATE: "1e-18"}, None),  # that one moves nothing
    ("learning-rate-unusual", EPOCHS | {RATE: "1e-12"}, EPOCHS | {RATE: "0"}, None),
    ("learning-rate-unusual", FULL | EPOCHS | {RATE: "9.9e-10"}, FULL | EPOCHS | {RATE: "1e-9"}, None),
    ("learning-rate-unusual", SGD | EPOCHS | {RATE: "9.9e-6"}, SGD | EPOCHS | {RATE: "1e-5"}, None),
    ("learning-rate-unusual", EPOCHS | {"method.type": "IA3", "method.lora": None, RATE: "1e-9"}, EPOCHS | {"method.type": "IA3", "method.lora": None, RATE: "1e-8"}, None),
    ("warmup-ratio-unusual", {"training.warmupRatio": "0.51"}, {"training.warmupRatio": "0.5"}, None),
    # Which has an error of its own.
    ("warmup-ratio-unusual", {"training.warmupRatio": "0.9"}, {"training.warmupRatio": "1"}, None),
    ("weight-decay-unusual", {"training.weightDecay": "1.01"}, {"training.weightDecay": "1"}, None),
    ("dropout-unusual", lora(loraDropout="0.5"), lora(loraDropout="0.49"), None),
    ("dropout-unusual", lora(loraDropout="0.9"), lora(loraDropout="1"), None),
    ("dropout-unusual", settings("LoHa", moduleDropout="0.5"), settings("LoHa", moduleDropout="0.4"), None),
    # Methods without factors take other rates.
    ("learning-rate-unusual", {"training.learningRate": "0.3"}, {"method.type": "IA3", "method.lora": None, "training.learningRate": "0.3"}, None),
    # Neither is at fault by itself.
    ("steps-too-large", {"method.lora.r": 1, "method.lora.loraAlpha": 65536, "training.learningRate": "50"}, {"method.lora.r": 1, "method.lora.loraAlpha": 2, "training.learningRate": "2e-4"}, None),
    ("steps-too-large", {"method.lora.loraPlusRatio": "1000", "training.learningRate": "2e-3"}, {"method.lora.loraPlusRatio": "16", "training.learningRate": "2e-3"}, None),
    ("weight-decay-erases", {"training.learningRate": "2e-4", "training.weightDecay": "5000"}, {"training.learningRate": "2e-4", "training.weightDecay": "10"}, None),
    ("weight-decay-erases", {"method.lora.loraPlusRatio": "100", "training.weightDecay": "60"}, {"method.lora.loraPlusRatio": "2", "training.weightDecay": "60"}, None),
    ("no-effect-activation-checkpointing", {F + "activationCheckpointing": True, "training.activationCheckpointing": "Selective"}, {"training.activationCheckpointing": "Selective"}, None),
    ("evaluation-without-validation", {"evaluation.everySteps": 5}, {"evaluation.everySteps": 5, "data.validation.source": "pvc://data/held-out.jsonl"}, None),
    ("source-or-datasets", {"data.source": None}, {}, None),
    ("source-or-datasets", SETS | {"data.source": "pvc://data/train.jsonl"}, SETS, None),
    ("source-or-datasets", SETS | {"data.revision": COMMIT}, {"data.source": "hf://datasets/o/a", "data.revision": COMMIT}, None),
    ("chat-template-without-chat", {"data.chatTemplate": "{{ messages }}"}, CHAT | {"data.chatTemplate": "{{ messages }}"}, None),
    ("assistant-loss-without-chat", {"data.lossOn": "Assistant"}, CHAT | {"data.lossOn": "Assistant"}, None),
    ("assistant-loss-without-chat", {"data.lossOn": "Assistant", "data.format": "Text"}, {"data.format": "Text"}, None),
    ("dataset-weight-range", hub_sets("pvc://data/a.jsonl", weight="0"), hub_sets("pvc://data/a.jsonl", weight="0.01"), None),
    ("dataset-weight-range", hub_sets("pvc://data/a.jsonl", weight="100.5"), hub_sets("pvc://data/a.jsonl", weight="100"), None),
    ("txt-without-text", {"data.source": "pvc://data/a.TXT"}, {"data.source": "pvc://data/a.txt", "data.format": "Text"}, None),
    ("mapping-without-effect", {"data.mapping": {"messages": "m"}}, CHAT | {"data.mapping": {"messages": "m"}}, None),
    ("mapping-without-effect", {"data.mapping": {"preset": "ShareGPT"}}, {"data.mapping": {"preset": "Alpaca"}}, None),
    ("mapping-without-effect", CHAT | {"data.mapping": {"preset": "ShareGPT", "prompt": "q"}}, CHAT | {"data.mapping": {"preset": "Alpaca"}}, None),
    ("chat-template-unknown", CHAT | {"data.chatTemplate": "chat-ml"}, CHAT | {"data.chatTemplate": "ChatML"}, None),
    ("chat-template-unknown", CHAT | {"data.chatTemplate": "something else"}, CHAT | {"data.chatTemplate": "{{ messages }}"}, None),
    ("csv-with-chat", CHAT | {"data.source": "pvc://data/a.CSV"}, {"data.source": "pvc://data/a.csv"}, None),
    ("csv-with-chat", CHAT | {"data.source": "pvc://data/a.csv"}, CHAT | {"data.source": "pvc://data/a.csv", "data.mapping": {"preset": "Alpaca"}}, None),
    ("csv-with-chat", CHAT | {"data.validation.source": "pvc://data/a.csv"}, CHAT | {"data.source": "pvc://data/a.csv/b"}, None),
    ("completion-loss-on-text", {"data.format": "Text", "data.lossOn": "Completion"}, {"data.format": "Text", "data.lossOn": "All"}, None),
    ("merge-dtype-overflow", BF16 | {"merge.dtype": "float16"}, {"model.dtype": "float16", "merge.dtype": "float16"}, None),
    ("verification-agreement-range", {"merge.verify.minTop1Agreement": "1.01"}, {"merge.verify.minTop1Agreement": "1"}, None),
    ("verification-divergence-zero", {"merge.verify.maxKlDivergence": "0"}, {"merge.verify.maxKlDivergence": "1e-9"}, None),
    ("verification-divergence-zero", {"merge.verify.maxKlDivergence": "0.00"}, {"merge.verify.maxKlDivergence": "0", "merge.enabled": False}, None),
    ("merge-into-quantized", QLORA | {"merge.base": "Quantized"}, QLORA, None),
    ("merge-dequantized-without-qlora", {"merge.base": "Dequantized"}, QLORA | {"merge.base": "Dequantized"}, None),
    ("merge-while-sharded", {"merge.base": "Trained"}, {"merge.base": "Trained", "merge.enabled": False}, None),
    ("output-inside-input", {"data.source": "pvc://data/train", "output.destination": "pvc://data/train/tuned/"}, {"data.source": "pvc://data/train", "output.destination": "pvc://data/train-tuned"}, None),
    ("output-inside-input", {"output.destination": "pvc://models/base"}, {"output.destination": "pvc://models/base/tuned"}, None),
    ("output-inside-input", hub_sets("pvc://data", "pvc://results", "pvc://results-1/finetune-output") | {"output.destination": "pvc://data/tuned"}, hub_sets("pvc://data", "pvc://results") | {"output.destination": "pvc://results-1"}, None),
    ("output-inside-input", {"model.source": "pvc://models", "output.destination": "pvc://models"}, {"model.source": "pvc://models", "output.destination": "pvc://models/tuned"}, None),
    ("output-overlaps-bucket-input", BUCKET_DATA | {"output.destination": "s3://ours/a"}, BUCKET_DATA | TO_BUCKET, None),
    ("output-overlaps-bucket-input", {"model.source": "s3://ours/base", "output.destination": "s3://ours/base/"}, {"model.source": "s3://ours/base", "output.destination": "s3://ours/base/tuned"}, CPU),
    ("output-overlaps-bucket-input", {"data.source": "s3://ours"} | TO_BUCKET, {"model.source": "s3://ours"} | TO_BUCKET, None),
    ("output-overlaps-bucket-input", BUCKET_DATA | {"output.destination": "s3://ours"}, BUCKET_DATA, None),
    ("output-replaces-model", HUB_MODEL | {"output.destination": "hf://Our-Org/Llama"}, HUB_MODEL | TO_HUB, None),
    ("output-replaces-model", HUB_MODEL | {"model.source": "hf://Our-Org/Llama", "output.destination": "hf://our-org/llama"}, HUB_MODEL | TO_HUB, None),
    ("output-replaces-model", {"model.source": "hf://our-org/tuned-adapter"} | TO_HUB, HUB_MODEL | TO_HUB, None),
    ("output-replaces-model", HUB_MODEL | {"output.destination": "hf://our-org/llama/"}, HUB_DATA | {"output.destination": "hf://our-org/set"}, None),
    ("output-replaces-model", HUB_MODEL | WRITER | {"output.destination": "hf://our-org/llama"}, HUB_MODEL | TO_HUB | WRITER, CPU),
    ("destination-not-allowed", TO_HUB | WRITER, {}, NO_WAY_OUT),
    ("destination-not-allowed", TO_HUB | WRITER, TO_HUB | WRITER | {"output.adapter": False}, ONE_REPOSITORY),
    ("destination-not-allowed", TO_BUCKET, {"output.destination": "s3://ours/a/b"}, GATED),
    ("destination-not-allowed", {"output.destination": "hf://our-org-evil/tuned"} | WRITER, TO_HUB | WRITER, GATED),
    ("destination-not-allowed", {"output.destination": "oci://registry.test/team/a:v1"}, TO_REGISTRY, GATED),
    ("destination-not-allowed", {"output.destination": "oci://other/a/b"}, {"output.destination": "oci://other/a/b:v1"}, GATED),
    ("hub-destination-without-token", TO_HUB, TO_HUB | WRITER, CPU),
    ("hub-destination-without-token", TO_HUB, TO_REGISTRY, GATED),
    ("output-adapter-is-the-result", ALONE | {"output.adapter": False}, {"output.adapter": False}, None),
    ("output-adapter-is-the-result", LOHA | {"output.adapter": False}, LOHA, None),
    ("no-effect-output-adapter", FULL | {"output.adapter": False}, FULL, None),
    ("no-effect-output-secret", WRITER, WRITER | TO_BUCKET, None),
    ("no-effect-output-private", {"output.private": False}, {"output.private": False} | TO_HUB, None),
    ("no-effect-output-private", TO_REGISTRY | {"output.private": False}, TO_REGISTRY | {"output.private": True}, None),
    ("credentials-without-tls", TO_REGISTRY | WRITER, TO_REGISTRY, IN_CLEAR),
    ("credentials-without-tls", TO_HUB | WRITER, TO_BUCKET | WRITER, IN_CLEAR),
    ("workspace-claim-or-template", {"workspace.claimName": None}, TEMPLATE, None),
    ("workspace-claim-or-template", {"workspace.volumeClaimTemplate.storage": "1Gi"}, {}, None),
    ("workspace-inside-data", {"data.source": "pvc://workspace", "parallelism.nodes": 2}, {"data.source": "pvc://workspace/train", "parallelism.nodes": 2}, None),
    ("workspace-inside-data", HELD_OUT | {"data.validation.source": "pvc://workspace/"}, {"model.source": "pvc://workspace"}, None),
    ("workspace-inside-data", {"data.source": "pvc://workspace"}, TEMPLATE | {"data.source": "pvc://workspace"}, None),
    ("output-deleted-with-job", DELETED | OWN_CLAIM, TEMPLATE | OWN_CLAIM, None),
    ("output-deleted-with-job", DELETED | OWN_CLAIM, DELETED, None),
    ("output-deleted-with-job", DELETED | {"output.destination": "pvc://tuned-workspace"}, OWN_CLAIM, None),
    ("start-needs-named-claim", TEMPLATE | START, START, None),
    ("start-needs-named-claim", TEMPLATE | START, TEMPLATE, None),
    ("retain-with-named-claim", {"workspace.retain": "Delete"}, TEMPLATE | {"workspace.retain": "Delete"}, None),
    ("rehearsal-required", {"preflight.rehearsal": "Skip"}, {"preflight.rehearsal": "Run"}, REHEARSING),
    ("rehearsal-required", {"preflight.rehearsal": "Skip"}, {}, REHEARSING),
    ("profile-limit-exceeded", WITHIN | {"parallelism.nodes": 3}, WITHIN | {"parallelism.nodes": 2}, LIMITED),
    ("profile-limit-exceeded", WITHIN | {"parallelism.processesPerNode": 9}, WITHIN | {"parallelism.processesPerNode": 8}, LIMITED),
    ("profile-limit-exceeded", WITHIN | {"parallelism.nodes": 2, "parallelism.processesPerNode": 5}, WITHIN | {"parallelism.nodes": 2, "parallelism.processesPerNode": 4}, LIMITED),
    ("profile-limit-exceeded", WITHIN | TEMPLATE | {"workspace.volumeClaimTemplate.storage": "101Gi"}, WITHIN | TEMPLATE | {"workspace.volumeClaimTemplate.storage": "100Gi"}, LIMITED),
    # As numbers, not as text: "9Gi" is less than "100Gi", and "1Ti" more.
    ("profile-limit-exceeded", WITHIN | TEMPLATE | {"workspace.volumeClaimTemplate.storage": "1Ti"}, WITHIN | TEMPLATE | {"workspace.volumeClaimTemplate.storage": "9Gi"}, LIMITED),
    ("profile-limit-exceeded", WITHIN | {"run.activeDeadlineSeconds": 3601}, WITHIN, LIMITED),
    ("profile-limit-exceeded", WITHIN | {"run.activeDeadlineSeconds": None}, WITHIN, LIMITED),
    ("profile-limit-exceeded", WITHIN | {"run.maxRestarts": 2}, WITHIN, LIMITED),
    ("profile-limit-exceeded", WITHIN | {"parallelism.processesPerNode": 9}, WITHIN | {"run.maxRestarts": 0}, LIMITED),
    ("remote-code-not-allowed", {"model.allowRemoteCode": True}, {"model.allowRemoteCode": False}, CPU),
    ("hub-source-without-revision", {"model.source": "hf://our-org/llama"}, HUB_MODEL, None),
    ("hub-source-without-revision", HUB_DATA | {"data.revision": None}, HUB_DATA, None),
    ("hub-source-without-revision", hub_sets("hf://datasets/o/a", "pvc://data/b.jsonl", "hf://datasets/o/c"), hub_sets("hf://datasets/o/a", "hf://datasets/o/c", revision=COMMIT), None),
    ("hub-source-without-revision", {"data.validation.source": "hf://datasets/o/a/held-out.jsonl"}, {"data.validation": {"source": "hf://datasets/o/a/held-out.jsonl", "revision": COMMIT}}, None),
    ("revision-without-hub-source", {"model.revision": COMMIT}, HUB_MODEL, None),
    ("hub-name-with-hub-source", HUB_MODEL | {"model.hubName": "org/other"}, {"model.hubName": "org/other"}, None),
    ("revision-without-hub-source", BUCKET_DATA | {"data.revision": COMMIT}, BUCKET_DATA, None),
    ("revision-without-hub-source", hub_sets("pvc://data/a", "s3://bucket/c", revision=COMMIT), hub_sets("pvc://data/a", "s3://bucket/c"), None),
    ("model-source-is-dataset", HUB_MODEL | {"model.source": "hf://datasets/our-org/llama/sub"}, HUB_MODEL, None),
    ("model-source-inside-repository", HUB_MODEL | {"model.source": "hf://our-org/llama/original"}, HUB_MODEL, None),
    ("model-source-inside-repository", HUB_MODEL | {"model.source": "hf://a/b/c"}, {"model.source": "s3://bucket/b/c"}, None),
    ("data-source-is-model", HUB_DATA | {"data.source": "hf://our-org/set/"}, HUB_DATA | {"data.source": "hf://our-org/a/b"}, None),
    ("data-source-is-model", hub_sets("hf://a/b", "hf://datasets/a/b", revision=COMMIT), HUB_MODEL, None),
    ("source-not-allowed", HUB_MODEL, {}, CLOSED),
    ("source-not-allowed", BUCKET_DATA, {}, CLOSED),
    ("source-not-allowed", HUB_MODEL | {"model.source": "hf://our-org-evil/llama"}, HUB_MODEL, FENCED),
    ("source-not-allowed", HUB_DATA | {"data.source": "hf://datasets/our-org/settings"}, HUB_DATA, FENCED),
    ("source-not-allowed", {"data.source": "s3://ours/ab"}, BUCKET_DATA, FENCED),
    ("source-not-allowed", hub_sets("s3://ours/a/b", "s3://theirs/a"), hub_sets("s3://ours/a/b", "pvc://theirs/a"), FENCED),
    ("no-effect-hub-token", {"fetch.hubTokenSecretRef.name": "hub"}, HUB_DATA | {"fetch.hubTokenSecretRef.name": "hub"}, None),
    ("no-effect-s3-secret", HUB_DATA | {"fetch.s3SecretRef.name": "keys"}, BUCKET_DATA | {"fetch.s3SecretRef.name": "keys"}, None),
    ("fsdp1-adapter-unit", V1 | settings("LoHa") | PEFTS, V1 | settings("LNTuning") | PEFTS, None),
    ("fsdp1-adapter-unit", V1 | LOHA | PEFTS | FLAT, V1 | settings("OFT") | PEFTS | FLAT, None),
    ("fsdp1-adapter-unit", V1 | settings("HRA") | PEFTS, V1 | settings("OFT") | PEFTS, None),
    ("fsdp1-adapter-unit", V1 | LOHA | FLAT, V1 | settings("MiSS") | FLAT | {F + "autoWrapPolicy": "SIZE_BASED_WRAP"}, None),
    ("fsdp1-adapter-unit", V1 | LOHA | PEFTS, V1 | LOHA | PEFTS | {F + "useOrigParams": True}, None),
    ("method-setting-unknown", settings("LoHa", R=8), settings("LoHa", r=8), None),
    ("method-setting-unknown", settings("VeRA", dinitial="1"), settings("VeRA", dInitial="1"), None),
    ("method-setting-unknown", settings("IA3", loraAlpha=8), settings("IA3", feedforwardModules=[]), None),
    ("method-setting-type", settings("LoHa", r="8"), settings("LoHa", r=8), None),
    ("method-setting-type", settings("LoHa", moduleDropout="0." + "0" * 400), settings("LoHa", moduleDropout="0.1"), None),
    ("method-setting-type", settings("LoHa", moduleDropout=True), settings("LoHa", moduleDropout=0), None),
    ("method-setting-type", settings("VeRA", saveProjection="yes"), settings("VeRA", saveProjection=False), None),
    ("method-setting-type", settings("LoHa", modulesToSave="lm_head"), settings("LoHa", modulesToSave=["lm_head"]), None),
    ("method-setting-type", settings("MiSS", initWeights="bats"), settings("MiSS", initWeights="bat"), None),
    ("method-setting-range", settings("LoHa", r=0), settings("LoHa", r=1), None),
    ("method-setting-range", settings("VeRA", veraDropout="1"), settings("VeRA", veraDropout="0.99"), None),
    ("method-setting-range", settings("OFT", oftBlockSize=1), settings("OFT", oftBlockSize=2), None),
    ("method-setting-range", settings("LoHa", layersToTransform=-1, **Q), settings("LoHa", layersToTransform=0, **Q), None),
    ("method-setting-range", settings("HRA", bias="hra"), settings("HRA", bias="hra_only"), None),
    ("method-setting-range", settings("LoKr", rankPattern={"q": "4"}), settings("LoKr", rankPattern={"q": 4}), None),
    ("method-setting-range", settings("TrainableTokens"), settings("TrainableTokens", tokenIndices=[3]), None),
    ("method-setting-range", settings("TrainableTokens", tokenIndices=[-3, 4, 4]), settings("TrainableTokens", tokenIndices=[4]), None),
    ("method-settings-conflict", settings("OFT", r=8), settings("OFT", r=8, oftBlockSize=0), None),
    ("method-settings-conflict", settings("BOFT", boftBlockNum=8), settings("BOFT", boftBlockNum=8, boftBlockSize=0), None),
    ("method-settings-conflict", settings("HRA", applyGS=True), settings("HRA", applyGS=True, initWeights=False), None),
    ("method-settings-conflict", settings("IA3", feedforwardModules=["q"], targetModules=["v"]), settings("IA3", feedforwardModules=["q"], targetModules=["v", "q"]), None),
    ("method-settings-conflict", settings("LoHa", layersPattern="h", **Q), settings("LoHa", layersPattern="", **Q), None),
    ("method-setting-on-one-rank-only", settings("LoKr", moduleDropout="0.1") | TWO, settings("LoKr", moduleDropout="0.1"), None),
    ("method-setting-on-one-rank-only", settings("OFT", coft=True) | TWO, settings("OFT", coft=False) | TWO, None),
    ("no-effect-method-setting", settings("OFT", moduleDropout="0.1"), settings("LoHa", moduleDropout="0.1"), None),
    ("decay-within-warmup", DECAY | {"training.warmupRatio": "0.3", "training.decayRatio": "0.8"}, DECAY | HALVES, None),
    ("decay-within-warmup", DECAY | {"training.warmupRatio": "0.9"}, {"training.warmupRatio": "0.9"}, None),
    # A run that is all warm-up is another rule's.
    ("decay-within-warmup", DECAY | {"training.warmupRatio": "0.9"}, DECAY | {"training.warmupRatio": "1"}, None),
    # Of what nobody wrote the defaults leave room.
    ("decay-within-warmup", DECAY | HALVES | {"training.decayRatio": "0.51"}, DECAY | {"training.decayRatio": "0.97"}, None),
    ("target-modules-empty", lora(targetModules=[]), lora(targetModules=["q"]), None),
    ("target-modules-empty", {"method.lora.targetModules": []} | DORA, EXPERTS | {"method.lora.targetModules": []}, None),
    ("module-adapted-and-excluded", lora(targetModules=["q", "v"], excludeModules=["q"]), lora(excludeModules=["q"]), None),
    ("module-expression-malformed", settings("LoHa", targetModules="(q"), settings("LoHa", targetModules="(q)"), None),
    ("module-name-malformed", settings("LoHa", targetModules=["q,v"]), settings("LoHa", targetModules=["q", "v"]), None),
    ("all-linear-beside-names", settings("HRA", targetModules=["q", "all-linear"]), settings("HRA", targetModules=["q"]), None),
    ("module-adapted-and-saved", settings("IA3", targetModules=["q"], modulesToSave=["q"]), settings("IA3"), None),
    ("adapter-pattern-malformed", settings("LoKr", alphaPattern={"": 4}), settings("LoKr", alphaPattern={"q": 4}), None),
    ("layers-without-targets", settings("VeRA", layersToTransform=[0]), settings("VeRA", layersToTransform=[0], **Q), None),
    ("layers-without-targets", settings("BOFT", layersToTransform=0, targetModules=".*q"), settings("BOFT", layersToTransform=[]), None),
    ("orthogonal-odd-rank", lora(initLoraWeights="orthogonal", r=5), lora(initLoraWeights="orthogonal", r=6), None),
    ("orthogonal-odd-rank", lora(initLoraWeights="orthogonal", rankPattern={"q": 3}, targetModules=["q", "v"]), lora(initLoraWeights="orthogonal", rankPattern={"q": 3}, targetModules=["k", "v"]), None),
    ("orthogonal-odd-rank", lora(initLoraWeights="orthogonal", r=5, rankPattern={"q": 4}, targetModules=["q", "v"]), lora(initLoraWeights="orthogonal", r=5, rankPattern={"q": 4}, targetModules=["q"]), None),
    ("orthogonal-odd-rank", lora(initLoraWeights="orthogonal", rankPattern={"k": 4, "q": 3, ".*": 4}, targetModules=["q", "v"]), lora(initLoraWeights="orthogonal", rankPattern={".*": 4, "q": 3}, targetModules=["q", "v"]), None),
    ("orthogonal-odd-rank", lora(initLoraWeights="orthogonal", rankPattern={"q": 3}, targetModules=["q"]), lora(initLoraWeights="orthogonal", rankPattern={"q": 3}, excludeModules=["q"]), None),
    ("float16-adapter", {"model.dtype": "float16", "method.lora.autocastAdapterDtype": False}, {"model.dtype": "float16", "method.lora.autocastAdapterDtype": False, "training.precision": "bf16"}, None),
    ("float16-adapter", TWO | {"model.dtype": "float16", "method.lora.autocastAdapterDtype": False, "training.precision": "bf16"}, V1 | {"model.dtype": "float16", "method.lora.autocastAdapterDtype": False, "training.precision": "bf16"}, None),
    ("fsdp1-lora-mixed-requires-grad", V1 | FLAT | UNPARTED | {F + "autoWrapPolicy": "NO_WRAP"}, V1 | FLAT | UNPARTED | {F + "autoWrapPolicy": "SIZE_BASED_WRAP"}, None),
    ("fsdp1-lora-mixed-requires-grad", V1 | FLAT | UNPARTED | {F + "transformerLayerClsToWrap": ["LlamaDecoderLayer"]}, V1 | FLAT | UNPARTED | {F + "transformerLayerClsToWrap": ["LlamaDecoderLayer", "Linear"]}, None),
    ("fsdp1-adapter-dtype", V1 | BF16 | UNPARTED | WIDE, V1 | BF16 | UNPARTED | {"method.lora.autocastAdapterDtype": True, F + "useOrigParams": True, F + "autoWrapPolicy": "SIZE_BASED_WRAP"}, None),
    ("fsdp1-qlora-compute-dtype", V1 | QLORA | BF16 | UNPARTED | AS_BASE | {F + "useOrigParams": True, "method.quantization.computeDtype": "float32"}, V1 | QLORA | BF16 | UNPARTED | AS_BASE | {F + "useOrigParams": True, "method.quantization.computeDtype": "float32", F + "autoWrapPolicy": "SIZE_BASED_WRAP"}, None),
    ("fsdp1-qlora-storage-not-model-dtype", V1 | QLORA | BF16 | {"method.quantization.quantStorage": "float16"}, V1 | QLORA | BF16 | {"method.quantization.quantStorage": "float16", F + "transformerLayerClsToWrap": ["Linear4bit"]}, None),
    ("trainable-token-repeated", lora(trainableTokenIndices=[3, 4, 3]), lora(trainableTokenIndices=[3, 4]), None),
    ("trainable-tokens-overlap", lora(trainableTokenIndices=[3], modulesToSave=["model.wte"]), lora(modulesToSave=["wte"]), None),
    ("trainable-tokens-overlap", lora(trainableTokenIndices=[3], targetModules=["q", "embed_tokens"]), lora(trainableTokenIndices=[3], targetModules=["q", "lm_head"]), None),
    ("fsdp1-trainable-tokens", V1 | TOKENS | {F + "useOrigParams": False}, V1 | TOKENS | {"model.dtype": "float32"}, None),
    ("fsdp1-trainable-tokens", V1 | TOKENS | DORA | BF16, V1 | TOKENS | DORA | {"model.dtype": "float32"}, None),
    ("fsdp1-trainable-tokens", V1 | TOKENS | BF16, V2 | TOKENS | BF16, None),
    ("fsdp1-trainable-tokens", V1 | ADDED | BF16, V1 | ADDED | BF16 | lora(modulesToSave=["embed_tokens", "lm_head"]), None),
    ("fsdp1-trainable-tokens", V1 | ADDED | {F + "useOrigParams": False}, V1 | ADDED | FULL, None),
    # Of a head that is not saved next to its embedding rows are trained, or the job is refused because it is tied.
    ("fsdp1-trainable-tokens", V1 | ADDED | BF16 | SAVED, V1 | ADDED | BF16 | lora(modulesToSave=["embed_tokens", "head"]), None),
    ("fsdp1-trainable-tokens", V1 | ADDED | SAVED | {F + "useOrigParams": False}, V1 | ADDED | SAVED, None),
    ("fsdp1-trainable-tokens", V1 | ADDED | BF16 | SAVED, V1 | BF16 | SAVED, None),
    ("fsdp1-trainable-tokens", V1 | ADDED | BF16 | SAVED, V1 | ADDED | BF16 | lora(modulesToSave=["embed_tokens"], targetModules=["lm_head"]), None),
    ("added-token-repeated", {"model.addedTokens": [TOOL, {"content": "<b>", "special": True}, {**TOOL, "special": True}]}, {"model.addedTokens": [TOOL, {"content": "<b>"}, {"content": "<a> "}]}, None),
    ("added-tokens-untrained", ADDED | settings("IA3"), ADDED, None),
    ("added-tokens-untrained", ADDED | LOHA, ADDED | FULL, None),
    ("added-tokens-untrained", ADDED | LOHA, ADDED | settings("TrainableTokens", tokenIndices=[3]), None),
    ("added-tokens-untrained", ADDED | LOHA, settings("LoHa", modulesToSave=["embed_tokens", "lm_head"]) | ADDED, None),
    ("added-tokens-untrained", ADDED | LOHA, LOHA, None),
    ("target-parameters-conflict", EXPERTS | DORA, EXPERTS, None),
    ("target-parameters-conflict", EXPERTS | {"method.lora.loraDropout": "0.1"}, EXPERTS | {"method.lora.loraDropout": "0"}, None),
    ("target-parameters-conflict", EXPERTS | {"method.lora.initLoraWeights": "orthogonal"}, EXPERTS, None),
    ("target-parameters-conflict", EXPERTS | {"method.lora.initLoraWeights": "pissa_niter_16"}, EXPERTS, None),
    ("target-parameters-all-layers", EXPERTS | {"method.lora.layersToTransform": [0]}, EXPERTS, None),
    ("target-parameters-all-layers", EXPERTS | {"method.lora.excludeModules": ["q"]}, EXPERTS | {"method.lora.excludeModules": ["q"], "method.lora.targetModules": ["all-linear"]}, None),
    ("fsdp1-target-parameters", V1 | EXPERTS, V2 | EXPERTS, None),
]  # fmt: skip


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
    assert not judged(manifest(HUB_MODEL | BUCKET_DATA), OPEN)
    assert not judged(manifest(HUB_MODEL | BUCKET_DATA), FENCED)
    assert not judged(manifest(HUB_MODEL | BUCKET_DATA), None)
    assert not judged(manifest({}), CLOSED)
    assert not judged(manifest({}), NO_WAY_OUT)
    for destination in (TO_HUB, TO_REGISTRY, {"output.destination": "s3://ours/a"}):
        assert not judged(manifest(destination | WRITER), GATED)
    assert not judged(manifest(TO_HUB), IN_CLEAR)
    assert not judged(manifest(TO_HUB), None)
    assert not judged(manifest(BUCKET_DATA | {"output.destination": "s3://ours/a"}), TWO_STORES)
    assert not judged(manifest(HUB_MODEL | {"output.destination": "hf://our-org/llama"}), TWO_HUBS)
    assert not judged(manifest({"model.allowRemoteCode": True}), TRUSTING)
    assert not judged(manifest({"model.allowRemoteCode": True}), None)
    assert not judged(manifest({F + "offloadParams": True}), GPU)


def test_copies_of_sources_have_places_of_their_own():
    """Held-out records at the place of those that are trained on would be the same; a key may have letters that no path has."""
    sources = (
        "s3://one/train.jsonl",
        "s3://two/train.jsonl",
        "s3://two/train.jsonl/",
        "pvc://data/train-1.jsonl",
        "s3://two/day=1",
    )
    spec = manifest(
        hub_sets(*sources) | {"data.validation.source": "hf://datasets/o/a/train.jsonl", "data.validation.revision": COMMIT}
    )
    (finding,) = judged(spec, CLOSED)
    data = applied(spec, finding.changes)["data"]
    places = ("train.jsonl", "train-2.jsonl", "train-2.jsonl", "train-1.jsonl", "day-1")
    assert [dataset["source"] for dataset in data["datasets"]] == [f"pvc://data/{place}" for place in places]
    assert data["validation"] == {"source": "pvc://data/train-3.jsonl"}
    assert not judged(applied(spec, finding.changes), CLOSED)


def found(changes: dict[str, Any], rule: str) -> Finding:
    return next(finding for finding in judged(manifest(changes)) if finding.rule == rule)


def test_a_finding_names_what_is_written_and_all_that_its_changes_change():
    float16 = V1 | {"model.dtype": "float16", F + "peftWrapPolicy": False}
    assert found(float16, "float16-adapter").field == f"spec.{F}peftWrapPolicy"
    assert found(float16 | AS_BASE, "float16-adapter").field == "spec.method.lora.autocastAdapterDtype"
    wrong = EXPERTS | DORA | {"method.lora.loraDropout": "0.1", "method.lora.initLoraWeights": "orthogonal"}
    conflict = found(wrong, "target-parameters-conflict")
    for change in conflict.changes:
        assert change.field.removeprefix("spec.") in conflict.fix
    assert found(settings("LoHa", r="8"), "method-setting-type").value == 'r: "8"'


def test_lora_with_a_quantised_base_is_meant_as_qlora():
    """Dropping the quantisation would need four times the memory; of other methods nobody knows which half was meant."""
    written = {"method.quantization": {"bits": 8, "quantType": "fp4"}}
    (finding,) = judged(manifest(TWO | written))
    method = applied(manifest(TWO | written), finding.changes)["method"]
    assert (method["type"], method["quantization"]) == ("QLoRA", {"bits": 4, "quantType": "fp4"})
    (finding,) = judged(manifest(TWO | DORA | written))
    method = applied(manifest(TWO | DORA | written), finding.changes)["method"]
    assert (method["type"], method["quantization"]) == ("QDoRA", {"bits": 4, "quantType": "fp4"})
    other = {"method.type": "LoHa", **written}
    (finding,) = judged(manifest(other))
    assert applied(manifest(other), finding.changes)["method"] == {"type": "LoHa"}


def test_qdora_has_the_rules_of_qlora_and_of_dora():
    """One rank, too: PEFT loses the scales of 8 bits when it takes norms."""
    packed = {"method.type": "QDoRA"}
    alone = packed | ALONE
    assert judged(manifest(alone | {"method.quantization": {"quantType": "fp4"}, "merge.base": "Dequantized"})) == ()
    for wrong, rule in (
        (alone | {"method.quantization": {"bits": 8}}, "quantization-bits"),
        (TWO | packed | {"method.quantization": {"bits": 8}}, "quantization-bits"),
        (V1 | packed | {"method.quantization": {"quantStorage": "uint8"}}, "fsdp1-qlora-integer-storage"),
        (V1 | packed | {F + "useOrigParams": True, F + "peftWrapPolicy": True}, "fsdp1-dora-orig-params"),
        (packed | {"method.lora": {"targetParameters": ["mlp.experts.down_proj"]}}, "target-parameters-conflict"),
    ):
        found = [each for each in judged(manifest(wrong)) if each.severity == "error"]
        assert [each.rule for each in found] == [rule]
        fixed = applied(manifest(wrong), found[0].changes)["method"]["type"]
        assert fixed == ("QLoRA" if rule == "target-parameters-conflict" else "QDoRA")


def test_a_text_of_modules_to_save_is_mended_to_a_list():
    """PEFT's LNTuning declares a text and looks for each of its letters; as a list it is what was meant."""
    spec = manifest(settings("LNTuning", modulesToSave="lm_head"))
    (finding,) = judged(spec)
    assert finding.rule == "method-setting-range"
    assert applied(spec, finding.changes)["method"]["settings"] == {"modulesToSave": ["lm_head"]}
    assert not judged(applied(spec, finding.changes))


@pytest.mark.parametrize("text", ["--5", "-", "9" * 4000, "\u0663", "1_0", " 5"])
def test_a_text_that_is_no_whole_number_is_not_taken_for_one(text):
    """`int` raises for some of these, which would end the pass, and reads others as nobody meant them."""
    spec = manifest(settings("LoHa", r=text))
    (finding,) = judged(spec)
    assert finding.rule == "method-setting-type"
    assert applied(spec, finding.changes)["method"]["settings"] == {}


def test_changes_are_told_as_a_manifest_writes_them():
    values = {"a": "1", "b": "2e-4", "c": "true", "d": COMMIT, "e": "LoRA", "f": 1, "g": ["1", 2], "h": {"k": None}, "i": None}
    told = changes_text(FieldChange(field=name, value=value) for name, value in values.items())
    assert told == f'a: "1", b: "2e-4", c: "true", d: "{COMMIT}", e: LoRA, f: 1, g: ["1", 2], h: {{k: null}}, i removed'


@pytest.mark.parametrize("text", ["1", "-2.5e-4", "0x1F", "12:30:45", "2024-01-01", "1_000", ".inf", "-.5", "Off", "~", ""])
def test_a_text_that_yaml_would_read_as_something_else_has_quotes(text):
    assert yaml_text(text) == f'"{text}"'
    assert yaml.safe_load(yaml_text(text)) == text


@pytest.mark.parametrize("text", ["LoRA", "100Gi", "8h", "pvc://models/base", "q_proj", "1.5 hours"])
def test_another_text_has_none(text):
    assert yaml_text(text) == text
    assert yaml.safe_load(text) == text


def test_errors_come_first():
    found = judged(manifest({F + "useOrigParams": True, "training.epochs": 1, F + "transformerLayerClsToWrap": []}))
    assert [finding.severity for finding in found] == ["error", "error", "warning"]


def test_every_finding_is_reported():
    found = judged(
        manifest(V1 | DORA | {F + "transformerLayerClsToWrap": [""], F + "useOrigParams": True, F + "peftWrapPolicy": True})
    )
    assert {finding.rule for finding in found} == {"wrap-class-name-blank", "fsdp1-dora-orig-params"}

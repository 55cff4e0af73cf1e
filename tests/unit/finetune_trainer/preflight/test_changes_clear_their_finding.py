"""The changes of a finding about the model clear it: what `finding.changes` says is a manifest that preflight takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune_job.finding import Finding
from finetune_job.rules.rule import with_changes
from finetune_trainer.preflight.model_process import check_model
from tests.support.tiny_model import plan_of, tiny_spec
from tests.unit.finetune_trainer.preflight.test_architecture import declared

FSDP = "parallelism.fsdp."
LORA = "method.lora."
FIRST = {FSDP + "version": 1}
FLAT = FIRST | {FSDP + "useOrigParams": False, "training.weightDecay": "0.1"}
CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("target-module-unknown", "llama", "bfloat16", {LORA + "targetModules": ["q_prj", "v_proj"]}),
    ("target-module-unknown", "llama", "bfloat16", {LORA + "excludeModules": ["zzz"]}),
    ("saved-module-unknown", "llama", "bfloat16", {LORA + "modulesToSave": ["nrm", "lm_haed"]}),
    ("adapter-pattern-unmatched", "llama", "bfloat16", {LORA + "rankPattern": {"q_prj": 2, "k_proj": 4}}),
    (
        "layer-number-unknown",
        "llama",
        "bfloat16",
        {LORA + "targetModules": ["q_proj"], LORA + "layersToTransform": [0, 7]},
    ),
    ("token-index-unknown", "llama", "bfloat16", {LORA + "trainableTokenIndices": [3, 264]}),
    ("wrap-class-unknown", "llama", "bfloat16", {FSDP + "transformerLayerClsToWrap": ["LlamaDecoder"]}),
    ("wrap-class-unknown", "llama", "bfloat16", {FSDP + "transformerLayerClsToWrap": ["GPT2Block"]}),
    ("packing-with-recurrent-layers", "mamba", "bfloat16", {LORA + "targetModules": ["in_proj"], "data.packing": True}),
    ("attention-not-supported", "gpt_oss", "bfloat16", {"model.attention": "sdpa", LORA + "targetModules": ["q_proj"]}),
    ("trained-in-float16", "llama", "float16", {LORA + "autocastAdapterDtype": False}),
    ("trained-in-float16", "llama", "float16", FIRST | {LORA + "autocastAdapterDtype": False, FSDP + "peftWrapPolicy": False}),
    (
        "qlora-storage-not-param-dtype",
        "llama",
        "bfloat16",
        {"method.type": "QLoRA", LORA + "modulesToSave": ["norm"], "method.quantization.quantStorage": "float32"},
    ),
    ("stacked-experts-under-fsdp1", "mixtral", "bfloat16", FIRST | {LORA + "targetModules": ["all-linear"]}),
    ("fsdp1-flat-parameter-mixed", "llama", "bfloat16", FLAT | {"method.type": "Full"}),
    (
        "fsdp1-flat-parameter-mixed",
        "qwen2",
        "bfloat16",
        FLAT | {"training.precision": "fp32", LORA + "targetModules": ["v_proj"], LORA + "modulesToSave": ["q_proj"]},
    ),
]


@pytest.mark.parametrize(("rule", "kind", "stored", "written"), CASES, ids=[f"{case[0]}-{n}" for n, case in enumerate(CASES)])
def test_the_changes_of_a_finding_clear_it(tmp_path: Path, rule: str, kind: str, stored: str, written: dict[str, Any]) -> None:
    spec = tiny_spec(parallelism={"processesPerNode": 2}, merge={"enabled": False}, data={"packing": False})
    spec["method"] = {"type": "LoRA"}
    for path, value in written.items():
        *parents, last = path.split(".")
        place = spec
        for part in parents:
            place = place.setdefault(part, {})
        place[last] = value
    directory = declared(tmp_path / "model", kind, stored)
    found = [finding for finding in refusals(spec, directory) if finding.rule == rule]
    assert found
    for finding in found:
        changed = with_changes({"spec": spec}, finding.changes)["spec"]
        assert changed != spec
        assert rule not in {each.rule for each in refusals(changed, directory)}, finding.changes


def refusals(spec: dict[str, Any], directory: Path) -> list[Finding]:
    return [finding for finding in check_model(plan_of(spec), directory)[1] if finding.severity == "error"]

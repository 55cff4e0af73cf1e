"""Names that PEFT takes for stacked experts: all of what it then adapts, leaves out, and writes down is known. Declared
models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from finetune_trainer.preflight.model_process import check_model
from tests.support.declared_model import declare_model
from tests.support.tiny_model import plan_of, tiny_spec

SIZES = {
    "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "head_dim": 8},
    "deepseek_v3": {
        "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 16,
    },
}  # fmt: skip
"""The last has linear layers of the names that its experts had: in its first layer, and next to the experts of the second."""
MLP = ["gate_proj", "up_proj", "down_proj"]
WEIGHTS = ["down_proj.weight", "gate_proj.weight", "up_proj.weight"]
NUM_DENSE = 6


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("declared")
    for kind, own in KINDS.items():
        declare_model(root / kind, AutoConfig.for_model(kind, **SIZES | own).to_dict() | {"dtype": "bfloat16"})
    return root


def findings(models: Path, kind: str, **lora: Any) -> dict[str, Any]:
    """By rule, without what is said of all-linear's routers; a message is about the first of its rule."""
    parallelism = {"processesPerNode": 2}
    spec = tiny_spec(parallelism=parallelism, merge={"enabled": False}, data={"packing": False})
    _, found = check_model(plan_of({**spec, "method": {"type": "LoRA", "lora": lora}}), models / kind)
    return {finding.rule: finding for finding in reversed(found) if finding.rule != "router-adapted"}


@pytest.mark.parametrize(("kind", "names"), [("qwen3_moe", MLP), ("mixtral", ["w1", "w2", "w3"]), ("qwen3_moe", ["gate"])])
def test_names_that_experts_had_are_known(models: Path, kind: str, names: list[str]) -> None:
    assert findings(models, kind, targetModules=["o_proj", *names]) == {}
    wrong = findings(models, kind, targetModules=["o_prj", *names])
    assert [(rule, finding.value) for rule, finding in wrong.items()] == [("target-module-unknown", "o_prj")]


def test_linear_layers_whose_names_are_taken_for_experts_are_named(models: Path) -> None:
    (finding,) = findings(models, "deepseek_v3", targetModules=["o_proj", *MLP]).values()
    assert (finding.rule, finding.severity) == ("target-module-not-adapted", "error")
    assert f"{NUM_DENSE} linear layers" in finding.message
    (change,) = finding.changes
    assert (change.field, change.value) == ("spec.method.lora.targetParameters", WEIGHTS)
    assert findings(models, "deepseek_v3", targetModules=["o_proj", *MLP], targetParameters=WEIGHTS) == {}
    assert findings(models, "deepseek_v3", targetModules=["o_proj"]) == {}


def test_a_default_that_leaves_them_out_is_a_warning(models: Path) -> None:
    (finding,) = findings(models, "deepseek_v3").values()
    assert (finding.rule, finding.severity) == ("linear-layers-without-adapter", "warning")
    assert findings(models, "deepseek_v3", targetModules=["all-linear"], targetParameters=WEIGHTS) == {}
    assert findings(models, "deepseek_v3", targetModules=["o_proj"], excludeModules=MLP) == {}
    assert findings(models, "mixtral") == {}


def test_names_that_would_exclude_linear_layers_alone_are_refused(models: Path) -> None:
    finding = findings(models, "deepseek_v3", excludeModules=["q_a_proj", *MLP])["experts-not-excluded"]
    (change,) = finding.changes
    assert change.value == ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_b_proj"]
    assert findings(models, "deepseek_v3", excludeModules=["q_a_proj", *MLP], targetModules=change.value) == {}
    assert "experts-not-excluded" not in findings(models, "deepseek_v3", excludeModules=["shared_experts.down_proj"])


@pytest.mark.parametrize("field", ["rankPattern", "alphaPattern"])
def test_a_pattern_that_pefts_own_stands_before_is_refused(models: Path, field: str) -> None:
    (finding,) = findings(models, "mixtral", **{field: {".*proj": 3}}).values()
    assert (finding.rule, finding.field) == ("adapter-pattern-on-experts", f"spec.method.lora.{field}")
    assert findings(models, "mixtral", **{field: {"o_proj": 3}}) == {}


def test_patterns_are_for_adapted_parameters_too(models: Path) -> None:
    named = {"targetModules": ["o_proj"], "targetParameters": ["mlp.experts.down_proj"]}
    assert findings(models, "mixtral", **named, rankPattern={"experts.down_proj": 3}) == {}
    assert set(findings(models, "mixtral", **named, rankPattern={"experts.gate_up_proj": 3})) == {"adapter-pattern-unmatched"}


@pytest.mark.parametrize("saved", ["gate", "experts", "mlp", "model.layers.1.mlp.gate"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_what_is_adapted_as_a_parameter_is_not_trained_whole_too(models: Path, kind: str, saved: str) -> None:
    """PEFT: "modules_to_save cannot be applied to modules of type ParamWrapper", or adapters inside the frozen original."""
    (finding,) = findings(models, kind, modulesToSave=[saved, "lm_head"]).values()
    assert (finding.rule, finding.field, finding.value) == ("experts-adapted-and-saved", "spec.method.lora.modulesToSave", saved)
    (change,) = finding.changes
    assert findings(models, kind, modulesToSave=change.value) == {}
    assert findings(models, kind, modulesToSave=[saved], targetModules=["q_proj", "v_proj"]) == {}


def test_experts_that_are_named_as_parameters_are_not_trained_whole_too(models: Path) -> None:
    parameters = ["mlp.experts.down_proj"]
    finding = findings(models, "mixtral", modulesToSave=["experts"], targetParameters=parameters)["experts-adapted-and-saved"]
    assert "spec.method.lora.targetParameters" in finding.fix
    assert findings(models, "mixtral", modulesToSave=["gate"], targetParameters=parameters) == {}


def test_settings_for_which_a_package_is_missing_are_refused_and_end_nothing(models: Path) -> None:
    """PEFT asks for scipy. The rule book refuses this start before; who allows it nevertheless hears of it here."""
    found = findings(models, "qwen3_moe", initLoraWeights="loftq", modulesToSave=["embed_tokens"])
    assert [finding.severity for finding in found.values()] == ["error"]
    assert "scipy" in next(iter(found.values())).message

"""Experts that are not packed, and routers that are adapted unasked, are told of. From declared models."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune_trainer.preflight.model_process import check_model
from tests.unit.finetune_trainer.preflight.test_architecture import Q, declared, plan


@pytest.mark.parametrize(("method", "unpacked"), [("QLoRA", "LoRA"), ("QDoRA", "DoRA")])
def test_experts_that_are_not_packed_are_told_of(tmp_path: Path, method: str, unpacked: str) -> None:
    """Of each of two layers: attention 3,072 values, 4 experts 18,432, router 128, norms 64; and 2 x 8,448 and 32 around them."""
    directory = declared(tmp_path / "model", "mixtral")
    _, findings = check_model(plan({"type": method, **({"lora": Q} if method == "QDoRA" else {})}), directory)
    (found,) = [finding for finding in findings if finding.rule == "experts-not-packed"]
    assert (found.severity, found.field, found.value) == ("warning", "spec.method.type", method)
    # 6,144 and 36,864 of 60,320.
    assert "only 10.2% of the base is packed to 4 bits" in found.message
    assert "4 stacked parameters" in found.message
    assert "61.1% stay in bfloat16" in found.message
    assert f"set spec.method.type: {unpacked} if" in found.fix
    _, findings = check_model(plan({"type": "LoRA"}), directory)
    assert "experts-not-packed" not in {finding.rule for finding in findings}


@pytest.mark.parametrize(("kind", "router"), [("mixtral", "mlp.gate.weight"), ("gpt_oss", "mlp.router")])
def test_routers_that_all_linear_trains_are_told_of(tmp_path: Path, kind: str, router: str) -> None:
    directory = declared(tmp_path / "model", kind)
    _, findings = check_model(plan({"type": "LoRA"}), directory)
    found = {finding.rule: finding for finding in findings}.get("router-adapted")
    # GPT-OSS's router is a parameter that no adapter replaces.
    assert (found is not None) is (kind == "mixtral")
    if found is not None:
        assert (found.severity, found.field) == ("warning", "spec.method.lora.targetModules")
        assert f"2 routers, such as model.layers.0.{router}" in found.message
        assert "targetModules: [k_proj, o_proj, q_proj, v_proj]" in found.fix
        assert "targetParameters: [mlp.experts.down_proj, mlp.experts.gate_up_proj]" in found.fix
    _, findings = check_model(plan({"type": "LoRA", "lora": Q}), directory)
    assert "router-adapted" not in {finding.rule for finding in findings}


def test_a_router_that_is_a_layer_is_told_of_whatever_the_method(tmp_path: Path) -> None:
    directory = declared(tmp_path / "model", "afmoe")
    _, findings = check_model(plan({"type": "LoHa"}), directory)
    (found,) = [finding for finding in findings if finding.rule == "router-adapted"]
    assert (found.field, "mlp.router.gate" in found.message) == ("spec.method.settings.targetModules", True)
    assert "targetParameters" not in found.fix

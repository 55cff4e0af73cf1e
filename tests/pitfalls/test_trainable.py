"""FSDP 1 makes one flat parameter of a unit: it cannot be trainable in one part and frozen in another."""

import pytest

from tests.pitfalls.cases import Case
from tests.pitfalls.manifests import findings

RULE = "fsdp1-lora-mixed-requires-grad"
UNIFORM = "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`"


@pytest.mark.parametrize("policy", ["transformer", "none"])
def test_lora_in_flat_units_fails_without_pefts_policy(fails, policy):
    fails(Case(policy=policy), "ValueError", UNIFORM)
    assert RULE in findings({"version": 1, "useOrigParams": False, "peftWrapPolicy": False}, type="LoRA")


def test_pefts_policy_parts_trainable_and_frozen(learns):
    learns(Case(policy="peft"))
    assert RULE not in findings({"version": 1, "useOrigParams": False, "peftWrapPolicy": True}, type="LoRA")
    assert RULE not in findings({"version": 1, "useOrigParams": False}, type="LoRA")


def test_original_parameters_may_mix(learns):
    learns(Case(policy="transformer", use_orig_params=True))
    assert RULE not in findings({"version": 1, "useOrigParams": True, "peftWrapPolicy": False}, type="LoRA", dtype="float32")


def test_fsdp_2_flattens_nothing(learns):
    learns(Case(version=2))
    assert RULE not in findings({"version": 2, "useOrigParams": False, "peftWrapPolicy": False}, type="LoRA")


def test_trained_bias_fails_where_the_model_has_biases(fails, learns, base_with_biases):
    fails(Case(bias="all"), UNIFORM, model=base_with_biases)
    assert "fsdp1-trained-bias" in findings({"version": 1}, type="LoRA", lora={"bias": "all"})
    learns(Case(bias="none"), model=base_with_biases)
    learns(Case(bias="all", version=2), model=base_with_biases)
    assert "fsdp1-trained-bias" not in findings({"version": 2}, type="LoRA", lora={"bias": "all"})

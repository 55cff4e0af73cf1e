"""FSDP 1 makes one flat parameter of a unit: it cannot be trainable in one part and frozen in another."""

import pytest

from tests.pitfalls.lab.case import Case
from tests.pitfalls.lab.expect import fails, trains
from tests.pitfalls.manifests import findings

RULE = "fsdp1-lora-mixed-requires-grad"
UNIFORM = "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`"
BIASES = {"config": {"attention_bias": True}, "adapter": {"bias": "all"}}


@pytest.mark.parametrize("policy", ["transformer", "none"])
def test_lora_in_flat_units_fails_without_pefts_policy(policy):
    fails(Case(policy=policy), "shard", "ValueError", UNIFORM)
    assert RULE in findings({"version": 1, "useOrigParams": False, "peftWrapPolicy": False}, type="LoRA")


def test_pefts_policy_parts_trainable_and_frozen():
    trains(Case(policy="peft"))
    assert RULE not in findings({"version": 1, "useOrigParams": False, "peftWrapPolicy": True}, type="LoRA")
    assert RULE not in findings({"version": 1, "useOrigParams": False}, type="LoRA")


def test_original_parameters_may_mix():
    trains(Case(policy="transformer", use_orig_params=True))
    assert RULE not in findings({"version": 1, "useOrigParams": True, "peftWrapPolicy": False}, type="LoRA", dtype="float32")


def test_trained_bias_fails_where_the_model_has_biases():
    fails(Case(**BIASES), "shard", UNIFORM)
    assert "fsdp1-trained-bias" in findings({"version": 1}, type="LoRA", lora={"bias": "all"})
    trains(Case(config=BIASES["config"]))
    trains(Case(**BIASES, version=2))
    assert "fsdp1-trained-bias" not in findings({"version": 2}, type="LoRA", lora={"bias": "all"})

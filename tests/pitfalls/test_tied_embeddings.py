"""Embeddings and output head as one parameter, and single tokens trained in it."""

import pytest

from tests.pitfalls.lab.case import Case
from tests.pitfalls.lab.expect import fails, trains
from tests.pitfalls.manifests import findings

TIED = {"tie_word_embeddings": True}
TOKENS = {"trainable_token_indices": [3, 4]}
RULE = "fsdp1-trainable-tokens"


@pytest.mark.parametrize(
    "case",
    [Case(config=TIED, version=2), Case(config=TIED, policy="transformer", use_orig_params=True), Case(config=TIED)],
    ids=["fsdp-2", "layers", "peft"],
)
def test_tied_embeddings_train_under_both_versions(case):
    trains(case)


def test_trained_tokens_need_original_parameters_under_fsdp_1():
    fails(Case(adapter=TOKENS), "shard", "Must flatten tensors with uniform `requires_grad`")
    assert RULE in findings({"version": 1, "useOrigParams": False}, type="LoRA", lora={"trainableTokenIndices": [3, 4]})
    trains(Case(adapter=TOKENS, use_orig_params=True))
    assert RULE not in findings({"version": 2}, type="LoRA", lora={"trainableTokenIndices": [3, 4]})


def test_trained_tokens_of_tied_embeddings_train_and_are_not_loaded():
    trains(Case(config=TIED, adapter=TOKENS, version=2))
    fails(Case(config=TIED, adapter=TOKENS, version=2, until="resume"), "resume", "got mixed torch.Tensor and DTensor")

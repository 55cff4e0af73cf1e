"""Documents in one row do not see each other: on the real model, under both attention implementations."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from finetune_trainer.data.batches import PreparedSplit
from finetune_trainer.data.shards import SplitArrays
from finetune_trainer.objective.next_token import NextToken

FIRST, SECOND, OTHER = [5, 6, 7, 8, 9], [3, 4, 5, 6, 3, 2], [9, 9, 1, 1, 30, 31]


def packed(*documents):
    ends = np.cumsum([len(document) for document in documents])
    num_tokens = int(ends[-1])
    arrays = SplitArrays(
        tokens=np.array([token for document in documents for token in document], dtype=np.int32),
        supervised=~np.isin(np.arange(num_tokens), [0, *ends]),
        document_ends=ends,
        sequence_ends=np.array([len(documents)]),
        supervised_tokens=np.array([num_tokens - len(documents)]),
    )
    return PreparedSplit.of(arrays, pad_token_id=0).batch([0])


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def model(request):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        initializer_range=0.5, attn_implementation=request.param,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def logits(model, batch, position_ids=None, use_cache=False):
    """As the training loop calls the model."""
    positions = batch.position_ids if position_ids is None else position_ids
    with torch.no_grad():
        return model(input_ids=batch.input_ids, position_ids=positions, use_cache=use_cache).logits[0]


def test_changing_a_document_changes_no_logit_of_the_others(model):
    before, after = logits(model, packed(FIRST, SECOND, FIRST)), logits(model, packed(FIRST, OTHER, FIRST))
    first, last = slice(0, 5), slice(11, 16)
    assert torch.equal(before[first], after[first])
    assert torch.equal(before[last], after[last])
    assert not torch.allclose(before[5:11], after[5:11])


def test_a_document_has_the_logits_that_it_has_alone(model):
    together = logits(model, packed(FIRST, SECOND))
    torch.testing.assert_close(together[5:11], logits(model, packed(SECOND))[:6], rtol=1e-4, atol=1e-5)


def test_the_training_loss_of_a_packed_row_is_the_sum_of_its_documents(model):
    def loss(*documents):
        return float(NextToken().weighted_loss(model, packed(*documents), 1.0, torch.device("cpu"), None).detach())

    assert loss(FIRST, SECOND, OTHER) == pytest.approx(loss(FIRST) + loss(SECOND) + loss(OTHER), rel=1e-5)


@pytest.mark.parametrize("kind", ["gpt_oss", "opt", "falcon", "mpt"])
def test_models_that_hand_their_masks_no_positions_keep_documents_apart_in_training(kind):
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"intermediate_size": 32, "num_local_experts": 4, "head_dim": 8} if kind == "gpt_oss" else {}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **experts, initializer_range=0.5)).eval()
    objective = NextToken()
    objective.install(model)

    def loss(*documents):
        return float(objective.weighted_loss(model, packed(*documents), 1.0, torch.device("cpu"), None).detach())

    assert loss(FIRST, SECOND, OTHER) == pytest.approx(loss(FIRST) + loss(SECOND) + loss(OTHER), rel=1e-5)


def test_without_the_reset_documents_do_see_each_other(model):
    """Guards the tests above: they would notice."""
    straight = torch.arange(16)[None]
    before = logits(model, packed(FIRST, SECOND, FIRST), straight)
    after = logits(model, packed(FIRST, OTHER, FIRST), straight)
    assert not torch.allclose(before[11:16], after[11:16], atol=1e-3)


def test_with_a_cache_documents_do_see_each_other(model):
    """transformers looks for packed documents only where it makes no cache, which is why our calls say use_cache=False."""
    before = logits(model, packed(FIRST, SECOND, FIRST), use_cache=True)
    after = logits(model, packed(FIRST, OTHER, FIRST), use_cache=True)
    assert not torch.allclose(before[11:16], after[11:16], atol=1e-3)

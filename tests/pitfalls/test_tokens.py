"""Rows of the embedding that are trained next to an adapter: each once, in one way, and under FSDP 1 in a unit that holds
them."""

from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftConfig, get_peft_model
from tokenizers import AddedToken
from transformers import AutoTokenizer

from tests.pitfalls.lab.ranks import run_ranks
from tests.pitfalls.manifests import findings, specs
from tests.pitfalls.one_process import llama, tokens
from tests.support.tiny_model import write_tokenizer


def adapted(base: dict[str, Any] | None = None, **settings: Any) -> torch.nn.Module:
    return get_peft_model(llama(**(base or {})), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], **settings))


def test_a_repeated_token_has_two_rows():
    rule = "trainable-token-repeated"
    rows = [tuple(p.shape) for name, p in adapted(trainable_token_indices=[3, 3]).named_parameters() if "tokens_delta" in name]
    assert rows == [(2, 32)]
    assert rule in findings(type="LoRA", lora={"trainableTokenIndices": [3, 3]})
    rows = [tuple(p.shape) for name, p in adapted(trainable_token_indices=[3]).named_parameters() if "tokens_delta" in name]
    assert rows == [(1, 32)]
    assert rule not in findings(type="LoRA", lora={"trainableTokenIndices": [3]})


def test_the_embedding_is_trained_in_one_way():
    rule = "trainable-tokens-overlap"
    model = adapted(trainable_token_indices=[3], modules_to_save=["embed_tokens"])
    with pytest.raises(ValueError, match="wraps an unknown layer type"):
        model(input_ids=tokens())
    assert rule in findings(type="LoRA", lora={"trainableTokenIndices": [3], "modulesToSave": ["embed_tokens"]})
    with pytest.raises(TypeError, match="trainable_token_indices cannot be applied"):
        get_peft_model(
            llama(), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["embed_tokens"], trainable_token_indices=[3])
        )
    assert rule in findings(type="LoRA", lora={"trainableTokenIndices": [3], "targetModules": ["embed_tokens"]})
    assert adapted(trainable_token_indices=[3], modules_to_save=["lm_head"])(input_ids=tokens()).logits.shape[-1] == 64
    assert rule not in findings(type="LoRA", lora={"trainableTokenIndices": [3], "modulesToSave": ["lm_head"]})


def test_a_token_beyond_the_embedding():
    """Preflight's `token-index-unknown` says so, because the rule book does not know the vocabulary."""
    with pytest.raises(IndexError, match="out of bounds"):
        adapted(trainable_token_indices=[64])
    adapted(trainable_token_indices=[63])


def test_tied_heads_follow_the_rows():
    """Trained rows of a tied embedding are the head's, too; with the head saved whole the first pass fails."""
    tied = {"tie_word_embeddings": True}
    model = adapted(tied, trainable_token_indices=[3])
    before = model(input_ids=tokens()).logits.detach()
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "tokens_delta" in name).add_(1.0)
    after = model(input_ids=tokens()).logits.detach()
    assert not torch.equal(before[:, :, 3], after[:, :, 3])
    model = adapted(tied, trainable_token_indices=[3], modules_to_save=["lm_head"])
    with pytest.raises(ValueError, match="wraps an unknown layer type"):
        model(input_ids=tokens())


def shard_one(rank: int, settings: dict[str, Any], dtype: str, use_orig_params: bool) -> float:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = adapted(trainable_token_indices=[3], **settings)
    model.base_model.model.to(getattr(torch, dtype))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and settings.get("autocast", True):
            parameter.data = parameter.data.float() if "tokens_delta" in name else parameter.data
    wrapped = FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    loss = wrapped(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    return float(loss.detach())


def test_trained_rows_under_fsdp_1():
    rule = "fsdp1-trainable-tokens"
    rows = {"trainableTokenIndices": [3]}
    (error, *_) = [result.error for result in run_ranks(shard_one, {}, "float32", False) if result.failed]
    assert "requires_grad" in error
    assert rule in findings({"version": 1, "useOrigParams": False}, type="LoRA", lora=rows)
    (error, *_) = [result.error for result in run_ranks(shard_one, {}, "bfloat16", True) if result.failed]
    assert "uniform dtype" in error
    assert rule in findings({"version": 1}, type="LoRA", lora=rows, dtype="bfloat16")
    assert not any(result.failed for result in run_ranks(shard_one, {}, "float32", True))
    assert rule not in findings({"version": 1, "useOrigParams": True}, type="LoRA", lora=rows, dtype="float32")
    assert rule not in findings({"version": 2}, type="LoRA", lora=rows, dtype="bfloat16")


def test_a_token_is_added_once(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    known = len(tokenizer)
    tokenizer.add_tokens([AddedToken("<|tool|>"), AddedToken("<|tool|>", special=True)])
    assert len(tokenizer) == known + 1
    assert tokenizer.added_tokens_decoder[known].special is True
    tool = {"content": "<|tool|>"}
    _, right = specs("added-token-repeated", {"model.addedTokens": [tool, {**tool, "special": True}]})
    assert [token.model_dump(exclude_defaults=True) for token in right.model.added_tokens or []] == [tool]


def last_row_moves(config: PeftConfig) -> bool:
    """Whether training moves the row of a token that the embeddings were resized for."""
    base = llama(tie_word_embeddings=True)
    base.resize_token_embeddings(65, mean_resizing=False)
    begun = base.get_input_embeddings().weight[64].detach().clone()
    model = get_peft_model(base, config)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=1.0)
    ids = torch.full((1, 8), 64)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    return not torch.equal(model.merge_and_unload().get_input_embeddings().weight[64], begun)


def test_rows_of_added_tokens_stay_what_they_began_as():
    targets = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}
    assert not last_row_moves(IA3Config(**targets, feedforward_modules=[]))
    _, right = specs("added-tokens-untrained", {"model.addedTokens": [{"content": "<|tool|>"}], "method": {"type": "IA3"}})
    assert right.method.type == "LoRA"
    assert last_row_moves(LoraConfig(**targets, trainable_token_indices=[64]))

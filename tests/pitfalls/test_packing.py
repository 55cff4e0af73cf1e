"""Packed documents, padding and chats in the libraries themselves. Ours: tests/unit/finetune_trainer/data."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tests.pitfalls.one_process import VOCABULARY, llama


def test_documents_of_a_row_see_each_other_without_positions():
    model = llama(attn_implementation="eager").eval()
    first, second = torch.arange(8), torch.arange(20, 30)
    row = torch.cat([first, second])[None]
    again = torch.cat([torch.arange(8), torch.arange(10)])[None]
    with torch.no_grad():
        alone = model(input_ids=second[None]).logits[0]
        packed = model(input_ids=row, use_cache=False).logits[0, 8:]
        kept_apart = model(input_ids=row, position_ids=again, use_cache=False).logits[0, 8:]
    assert not torch.allclose(packed, alone, atol=1e-3)
    assert torch.allclose(kept_apart, alone, atol=1e-4)


def test_a_token_beyond_the_embedding_is_an_index_error():
    model = llama().eval()
    with pytest.raises(IndexError, match="out of range"):
        model(input_ids=torch.tensor([[VOCABULARY]]))
    assert model(input_ids=torch.tensor([[VOCABULARY - 1]])).logits.shape[-1] == VOCABULARY


def test_a_tokenizer_without_a_template_renders_no_chat():
    words = WordLevel({"[UNK]": 0, "hello": 1}, unk_token="[UNK]")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="[UNK]")
    chat = [{"role": "user", "content": "hello"}]
    with pytest.raises(ValueError, match="chat_template"):
        tokenizer.apply_chat_template(chat, tokenize=False)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "hello"

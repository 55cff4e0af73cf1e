"""Collators that take the end of a text for padding."""

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast


def tokenizer(**special: str) -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({"<end>": 0, "<pad>": 1, "a": 2}, unk_token="<end>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", **special)


def labels_of_the_end(**special: str) -> list[int]:
    collator = DataCollatorForLanguageModeling(tokenizer(**special), mlm=False)
    batch = collator([{"input_ids": torch.tensor([2, 2, 0])}, {"input_ids": torch.tensor([2, 0])}])
    return [int(labels[length - 1]) for labels, length in zip(batch["labels"], (3, 2), strict=True)]


def test_an_end_token_that_also_pads_is_never_learnt():
    assert labels_of_the_end(pad_token="<end>") == [-100, -100]
    assert labels_of_the_end(pad_token="<pad>") == [0, 0]

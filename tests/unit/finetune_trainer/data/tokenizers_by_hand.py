"""Tokenizers small enough to write the expected ids by hand."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = {"</s>": 0, "<s>": 1, "a": 2, "b": 3, "c": 4, "d": 5, "e": 6}


def word_tokenizer(start=False, end=False):
    """A token per word; `start` and `end`: whether the tokenizer itself adds these special tokens."""
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if start or end:
        template = f"{'<s> ' if start else ''}$A{' </s>' if end else ''}"
        tokenizer.post_processor = processors.TemplateProcessing(template, special_tokens=[("<s>", 1), ("</s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>")


def merging_tokenizer():
    """Byte pairs of single letters with one merge: `ab` is one token, 7."""
    vocabulary = {**WORDS, "ab": 7}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def byte_tokenizer(special_tokens=(), merges=(), chat_template=None, **roles):
    """A token per byte, so that any text is told back exactly.

    merges: pairs of byte texts that are one token. roles: such as eos_token="<|im_end|>".
    """
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*symbols, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special_tokens))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat_template, **roles)


def spacing_tokenizer(prepend_scheme=None):
    """In the manner of SentencePiece: a space is put before each text.

    prepend_scheme: of the pre-tokenizer that does it, None where the normalizer does.
    """
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"q:yes", "▁y", "ye", "yes", "▁yes"]
    merges = [("▁", "y"), ("y", "e"), ("ye", "s"), ("▁", "yes")]
    numbers = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(numbers, merges, unk_token="<unk>", byte_fallback=True))
    if prepend_scheme is None:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=prepend_scheme, split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>")

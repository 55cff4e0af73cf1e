"""Records -> documents: token ids and which of them are supervised.

The prompt is tokenised exactly as a caller will send it later, begin-of-sequence token included where the tokenizer adds one; the
end-of-sequence token is appended and supervised, else the model would never learn to stop. Called by prepare.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from finetune_job.api.data import LossOn
from finetune_trainer.data.read import Record

Tokenizer = Any
"""transformers.PreTrainedTokenizerBase, not imported here because it takes seconds to load."""


@dataclass(frozen=True)
class Document:
    """`supervised[i]`: the loss counts the prediction of token i. Never true for the first, which nothing precedes."""

    input_ids: list[int]
    supervised: list[bool]


def tokenize(tokenizer: Tokenizer, records: Sequence[Record], loss_on: LossOn) -> list[Document]:
    """One document per record, in order, of any length. The tokenizer must have an end-of-sequence token."""
    prompts = _with_start_tokens(tokenizer, [record.prompt for record in records])
    wholes = _with_start_tokens(tokenizer, [record.prompt + record.completion for record in records])
    documents = []
    for record, prompt, whole in zip(records, prompts, wholes, strict=True):
        # Where prompt and completion would share a token, the joint ids do not begin with the ids that the model sees when it is
        # asked; then both are tokenised apart. Elsewhere the joint form is the natural one (no space is added at the seam).
        ids = whole if whole[: len(prompt)] == prompt else prompt + _plain(tokenizer, record.completion)
        if not ids or ids[-1] != tokenizer.eos_token_id:
            ids = [*ids, tokenizer.eos_token_id]
        first_supervised = len(prompt) if loss_on is LossOn.COMPLETION and record.prompt else 0
        documents.append(Document(ids, [number >= max(first_supervised, 1) for number in range(len(ids))]))
    return documents


def _plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _with_start_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Ids with the special tokens that the tokenizer puts before a text, without an end token that it may put after it."""
    encoded = tokenizer(list(texts), add_special_tokens=True, verbose=False)["input_ids"]
    added_end = _ends_with_eos(tokenizer, tokenizer("", add_special_tokens=True)["input_ids"])
    return [ids[:-1] if added_end and _ends_with_eos(tokenizer, ids) else ids for ids in encoded]


def _ends_with_eos(tokenizer: Tokenizer, ids: Sequence[int]) -> bool:
    return bool(ids) and ids[-1] == tokenizer.eos_token_id

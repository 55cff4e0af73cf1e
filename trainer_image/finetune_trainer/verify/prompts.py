"""Makes prompts for a model without a data set. The comparison of logits needs tokens, but no meaningful text."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune_trainer.files import GENERATION_FILE
from finetune_trainer.weights.errors import BrokenCheckpointError
from finetune_trainer.weights.headers import CONFIG_FILE, read_json

NUM_PROMPTS = 4
NUM_TOKENS = 32
"""Number of tokens of each prompt, if the model has as many positions. It is small because computing prompts takes most of a
verification's time, and few suffice because a wrong merge is wrong at nearly every position (gate.py).
"""
_SPECIAL_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "sep_token_id", "unk_token_id")
_POSITION_FIELDS = ("max_position_embeddings", "n_positions")
_TOKENIZER_FILE, _TOKENIZER_CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"


def default_prompts(base: Path, num_rows: int | None = None) -> list[list[int]]:
    """Return NUM_PROMPTS sequences of ordinary tokens, always the same for the same model.

    num_rows: number of rows of the embeddings if the merge enlarged them; then an additional prompt contains added tokens.
    Raises MergeError for a broken config.json.
    """
    config = read_json(base / CONFIG_FILE)
    text = {**config, **(config.get("text_config") or {})}
    size = text.get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise BrokenCheckpointError(f"{base / CONFIG_FILE}: vocab_size is {size!r}, but should be a positive number of tokens.")
    added = range(size, max(size, num_rows or 0))
    special = set(_special_tokens(base, text))
    ordinary = [token for token in range(size) if token not in special] or [0]
    limits = [text[name] for name in _POSITION_FIELDS if isinstance(text.get(name), int)]
    length = max(1, min([NUM_TOKENS, *limits]))
    rng = random.Random(size)  # noqa: S311 - no secret: the same prompts each time
    prompts = [rng.choices(ordinary, k=length) for _ in range(NUM_PROMPTS)]
    if added:
        # As in real text, added tokens alternate with ordinary ones. As many different added tokens are used as fit.
        used = rng.sample(added, min(len(added), max(1, length // 2)))
        prompts.append([rng.choice(ordinary) if place % 2 == 0 else used[place // 2 % len(used)] for place in range(length)])
    return prompts


def _special_tokens(base: Path, config: Mapping[str, Any]) -> Iterator[int]:
    sources = [config]
    if (base / GENERATION_FILE).is_file():
        sources.append(read_json(base / GENERATION_FILE))
    for source in sources:
        for name in _SPECIAL_FIELDS:
            ids = source.get(name)
            yield from (token for token in (ids if isinstance(ids, list) else [ids]) if isinstance(token, int))
    if (base / _TOKENIZER_FILE).is_file():
        yield from (entry["id"] for entry in read_json(base / _TOKENIZER_FILE).get("added_tokens") or () if entry.get("special"))
    if (base / _TOKENIZER_CONFIG_FILE).is_file():
        added = read_json(base / _TOKENIZER_CONFIG_FILE).get("added_tokens_decoder") or {}
        yield from (int(number) for number, entry in added.items() if entry.get("special"))

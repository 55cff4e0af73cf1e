"""Prompts for a model that comes without a data set: the comparison needs tokens, not sense."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune_trainer.weights.errors import BrokenCheckpointError
from finetune_trainer.weights.headers import CONFIG_FILE, read_json

NUM_PROMPTS = 4
NUM_TOKENS = 32
"""Tokens of each prompt, if the model has as many positions. Products of prompts are the largest part of a verification, and a
wrong merge is wrong at nearly every position (gate.py).
"""
_SPECIAL_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "sep_token_id", "unk_token_id")
_POSITION_FIELDS = ("max_position_embeddings", "n_positions")
_TOKENIZER_FILE, _TOKENIZER_CONFIG_FILE, _GENERATION_FILE = "tokenizer.json", "tokenizer_config.json", "generation_config.json"


def default_prompts(base: Path, num_rows: int | None = None) -> list[list[int]]:
    """NUM_PROMPTS sequences of ordinary tokens, the same for the same model.

    num_rows: of embeddings that a merge made larger than the base's; then there is one more prompt, of added tokens. Raises
    MergeError for a broken config.json.
    """
    config = read_json(base / CONFIG_FILE)
    text = {**config, **(config.get("text_config") or {})}
    size = text.get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise BrokenCheckpointError(f"{base / CONFIG_FILE}: vocab_size is {size!r}, it should be a positive number of tokens.")
    added = range(size, max(size, num_rows or 0))
    special = set(_special_tokens(base, text))
    ordinary = [token for token in range(size) if token not in special] or [0]
    limits = [text[name] for name in _POSITION_FIELDS if isinstance(text.get(name), int)]
    length = max(1, min([NUM_TOKENS, *limits]))
    chosen = random.Random(size)  # noqa: S311 - no secret: the same prompts each time
    prompts = [chosen.choices(ordinary, k=length) for _ in range(NUM_PROMPTS)]
    if added:
        # As many different added tokens as there is room for, between ordinary ones, as in real text.
        some = chosen.sample(added, min(len(added), max(1, length // 2)))
        prompts.append([chosen.choice(ordinary) if place % 2 == 0 else some[place // 2 % len(some)] for place in range(length)])
    return prompts


def _special_tokens(base: Path, config: Mapping[str, Any]) -> Iterator[int]:
    sources = [config]
    if (base / _GENERATION_FILE).is_file():
        sources.append(read_json(base / _GENERATION_FILE))
    for source in sources:
        for name in _SPECIAL_FIELDS:
            ids = source.get(name)
            yield from (token for token in (ids if isinstance(ids, list) else [ids]) if isinstance(token, int))
    if (base / _TOKENIZER_FILE).is_file():
        yield from (entry["id"] for entry in read_json(base / _TOKENIZER_FILE).get("added_tokens") or () if entry.get("special"))
    if (base / _TOKENIZER_CONFIG_FILE).is_file():
        added = read_json(base / _TOKENIZER_CONFIG_FILE).get("added_tokens_decoder") or {}
        yield from (int(number) for number, entry in added.items() if entry.get("special"))

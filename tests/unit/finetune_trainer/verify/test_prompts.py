"""Prompts made from the vocabulary alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.verify.prompts import default_prompts
from finetune_trainer.weights.errors import BrokenCheckpointError


def write(directory: Path, **files: Any) -> Path:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def test_prompts_are_the_same_each_time_and_hold_ordinary_tokens_only(tmp_path: Path) -> None:
    base = write(
        tmp_path,
        config={"vocab_size": 40, "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": None},
        generation_config={"decoder_start_token_id": 4},
        tokenizer={"added_tokens": [{"id": 5, "special": True}, {"id": 6, "special": False}]},
        tokenizer_config={"added_tokens_decoder": {"39": {"special": True}}},
    )
    prompts = default_prompts(base)
    assert prompts == default_prompts(base)
    assert [len(prompt) for prompt in prompts] == [32] * 4
    tokens = {token for prompt in prompts for token in prompt}
    assert tokens <= set(range(40)) - {1, 2, 3, 4, 5, 39}
    assert len(tokens) > 30
    assert len({tuple(prompt) for prompt in prompts}) == 4


def test_prompts_fit_the_models_positions_and_may_be_described_in_a_text_config(tmp_path: Path) -> None:
    base = write(tmp_path, config={"text_config": {"vocab_size": 9, "max_position_embeddings": 7, "eos_token_id": 0}})
    assert {len(prompt) for prompt in default_prompts(base)} == {7}
    assert all(0 < token < 9 for prompt in default_prompts(base) for token in prompt)


@pytest.mark.parametrize("size", [None, 0, "32000"])
def test_a_model_without_a_vocabulary_is_an_error(size: object, tmp_path: Path) -> None:
    with pytest.raises(BrokenCheckpointError, match="vocab_size"):
        default_prompts(write(tmp_path, config={"vocab_size": size}))

"""How long a text a model was made for: by its configuration, and by what its code does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MptConfig, Qwen2Config

from finetune_trainer.preflight.meta_model import max_positions, max_row


@pytest.mark.parametrize(
    ("written", "rope", "wanted"),
    [
        (32768, None, 32768),
        # Qwen2.5's and Qwen3's model cards.
        (32768, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (40960, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (32768, {"rope_type": "yarn", "factor": 4.0}, 131072),
        # Stretched by its publisher.
        (131072, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (16384, {"rope_type": "linear", "factor": 4.0}, 16384),
        (131072, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                  "original_max_position_embeddings": 8192}, 131072),
    ],
)  # fmt: skip
def test_positions_that_the_configuration_stretches(written: int, rope: dict[str, Any] | None, wanted: int) -> None:
    parameters = {} if rope is None else {"rope_parameters": {"rope_theta": 1e6, **rope}}
    assert max_positions(Qwen2Config(max_position_embeddings=written, **parameters)) == wanted


def test_a_job_may_go_beyond_rotary_positions() -> None:
    """GPT-2 has a table of learnt positions, beyond which its code fails."""
    rotary, learnt = LlamaConfig(max_position_embeddings=64), GPT2Config(n_positions=64)
    assert [max_positions(config, 100) for config in (rotary, learnt)] == [100, 64]
    assert [max_positions(config, 32) for config in (rotary, learnt)] == [32, 64]
    assert [max_positions(config) for config in (rotary, learnt)] == [64, 64]


def test_what_says_nothing_or_nonsense() -> None:
    rope = {"rope_theta": 1e4, "rope_type": "yarn", "factor": float("nan"), "original_max_position_embeddings": 64}
    config = LlamaConfig(max_position_embeddings=64)
    config.rope_parameters = rope
    assert (max_positions(config), max_row(config)) == (64, None)
    assert max_positions(MptConfig()) is None


def test_mpt_fails_beyond_its_biases() -> None:
    config = MptConfig(d_model=32, n_heads=4, n_layers=1, max_seq_len=16, vocab_size=64)
    longest = max_row(config)
    assert longest == 16
    model = AutoModelForCausalLM.from_config(config)
    assert model(input_ids=torch.arange(longest)[None], use_cache=False).logits.shape[1] == longest
    # Packed as short documents, too.
    positions = torch.arange(longest + 1) % 9
    with pytest.raises(RuntimeError, match="size of tensor"):
        model(input_ids=positions[None], position_ids=positions[None], use_cache=False)

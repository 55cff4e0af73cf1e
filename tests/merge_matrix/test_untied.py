"""Output embeddings that an adapter changes can be separated from the input embeddings in every known model type."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from finetune_trainer.merge.merge_adapter import MergeOptions, merge_adapter
from finetune_trainer.weights.families import FAMILIES
from tests.unit.finetune_trainer.merge import tiny

DECODERS = [
    *(kind for kind, family in FAMILIES.items() if len(family.ties) == 1 and not family.always_tied and not family.rules),
    "nemotron",
]
"""Decoders without rules for names, because those with rules tie like Llama, and one that only the library knows."""
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
OTHERWISE_NAMED: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
}
COMPUTED = {"falcon": ("head_dim",)}
"""Sizes that a configuration computes itself."""


@pytest.mark.parametrize("kind", DECODERS)
def test_the_logits_are_those_of_base_and_adapter(kind: str, tmp_path: Path) -> None:
    sizes = SIZES | OTHERWISE_NAMED.get(kind, {})
    config = AutoConfig.for_model(kind, **{name: size for name, size in sizes.items() if name not in COMPUTED.get(kind, ())})
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    model.save_pretrained(tmp_path / "base")
    settings = LoraConfig(r=3, target_modules=["lm_head", "embed_out"], init_lora_weights=False)
    adapter = tiny.save_adapter(tmp_path / "adapter", tmp_path / "base", settings)
    merge_adapter(MergeOptions(tmp_path / "base", (adapter,), tmp_path / "merged", None, 1 << 30))

    tokens = torch.tensor([[1, 5, 3, 9, 44, 3]])
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
        before = base(tokens).logits
        wanted = PeftModel.from_pretrained(base, adapter).eval()(tokens).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert merged.get_output_embeddings().weight is not merged.get_input_embeddings().weight
    assert not merged.config.tie_word_embeddings
    with torch.no_grad():
        found = merged(tokens).logits
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert (before - wanted).abs().max() > 0.01 * wanted.abs().max()

"""LoRA on the linear layers of every causal language model that the locked transformers knows, merged with PEFT's bits.

The matrix has a few architectures with every method; this has every architecture with one. They are tiny, by names of settings
that most of them share.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from finetune_trainer.merge.merge_adapter import MergeOptions, merge_adapter
from finetune_trainer.model.load import reserve_parameters, without_values
from finetune_trainer.weights.errors import UnsupportedBaseError

pytestmark = pytest.mark.nightly

WIDTH, FEED_FORWARD, LAYERS, HEADS, EXPERTS, VOCABULARY = 32, 48, 2, 4, 4, 96
SETTINGS: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim"), FEED_FORWARD),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "head_dim", "state_size"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "sliding_window", "mamba_d_head"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "mamba_n_groups"), 1),
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "rotary_dim": 4,
    "mamba_n_heads": HEADS,
    "vocab_size": VOCABULARY,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "layer_types": None,
}
FURTHER: dict[str, dict[str, Any]] = {
    "dots3_note_text": {"num_key_value_heads": HEADS},
    "gemma4_text": {"vocab_size_per_layer_input": VOCABULARY},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"num_heads": HEADS, "head_dim": 16},
    "xlm": {"emb_dim": WIDTH, "n_words": VOCABULARY},
    "zaya": {"num_experts_per_tok": 1},
}
"""Additional settings that these types need."""
MAX_PARAMETERS = 20_000_000
INCOMPATIBLE = {model_type: {"out_proj"} for model_type in ("falcon_mamba", "mamba", "mamba2", "nemotron_h")}
WITHOUT_TINY_MODEL = {
    *("blt", "cohere_compass_text", "dbrx", "dots3_note", "emu3", "falcon_h1", "gemma3n", "gemma3n_text", "gemma4_assistant"),
    *("gemma4_unified_assistant", "lfm2_moe", "longcat_flash", "mllama", "musicgen", "musicgen_melody", "reformer", "zamba"),
    "zamba2",
}
"""Types that these settings make no model of, or none below MAX_PARAMETERS."""
STORED_OTHERWISE = {"hrm_text"}
"""Types whose adapted layers transformers makes from stored tensors in a way that no merge can write back."""


def tiny(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a configuration of the same type, with SETTINGS in it and in its parts."""
    known = {name: value for name, value in SETTINGS.items() if name in config.to_dict()}
    parts = {name: tiny(part) for name in config.sub_configs if isinstance(part := getattr(config, name), PreTrainedConfig)}
    return type(config)(**known | FURTHER.get(config.model_type, {}), **parts)


def save_base(directory: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """Save a model that was loaded, because loading changes rows of padding in some types."""
    torch.manual_seed(3)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory / "first")
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory / "first", dtype=torch.float32)
    loaded.save_pretrained(directory / "base", max_shard_size="60KB")
    return loaded


def linear_layers(model: PreTrainedModel) -> list[str]:
    """Return the last parts of their names, without the output layer and what PEFT excludes for Mamba."""
    head = model.get_output_embeddings()
    found = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    heads = {name.rpartition(".")[2] for name, module in model.named_modules() if module is head}
    return sorted(name for name in found - heads - INCOMPATIBLE.get(model.config.model_type, set()) if not name.isdigit())


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


TYPES = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - WITHOUT_TINY_MODEL)


@pytest.mark.parametrize("model_type", TYPES)
def test_a_model_without_values_has_the_buffers_and_ties_of_one_that_is_initialised(model_type: str) -> None:
    config, found = tiny(AutoConfig.for_model(model_type)), []
    for context in (init_empty_weights(include_buffers=False), without_values(allow_remote_code=False)):
        with context:
            model = AutoModelForCausalLM.from_config(config)
        reserve_parameters(model)
        paths: dict[int, set[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            paths.setdefault(id(parameter), set()).add(name)
        found.append((dict(model.named_buffers()), sorted(map(sorted, paths.values()))))
    (buffers, ties), (others, other_ties) = found
    assert ties == other_ties
    assert buffers.keys() == others.keys()
    assert [name for name in buffers if not torch.equal(buffers[name].nan_to_num(), others[name].nan_to_num())] == []


@pytest.mark.parametrize("model_type", TYPES)
def test_merge_has_the_bits_of_pefts(model_type: str, tmp_path: Path) -> None:
    config = tiny(AutoConfig.for_model(model_type))
    with torch.device("meta"):
        assert sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters()) < MAX_PARAMETERS
    model = save_base(tmp_path, config)
    adapted = get_peft_model(model, LoraConfig(r=5, lora_alpha=13, target_modules=linear_layers(model)))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape) / 8)
    adapted.save_pretrained(tmp_path / "adapter")
    options = MergeOptions(tmp_path / "base", (tmp_path / "adapter",), tmp_path / "merged", None, 50_000)
    if model_type in STORED_OTHERWISE:
        with pytest.raises(UnsupportedBaseError):
            merge_adapter(options)
        return
    assert merge_adapter(options).num_changed_tensors > 0
    # Of the model in memory: what PEFT loads of its own file leaves out layers that transformers stores under another name.
    adapted.merge_and_unload(safe_merge=False).save_pretrained(tmp_path / "expected")
    merged, expected = tensors(tmp_path / "merged"), tensors(tmp_path / "expected")
    assert merged.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(merged[name], expected[name])] == []

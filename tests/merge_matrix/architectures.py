"""Base models of the matrix: tiny, with random weights, of every kind that stores its parameters in another way."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GemmaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    T5Config,
)

from tests.unit.finetune_trainer.merge import moe, tiny

SMALL_SHARDS = "120KB"
"""Size of base shards where there are several; smaller than one tensor here and there."""
SMALL_OUTPUT_BYTES = 60_000
"""Size of output shards where there are several."""


@dataclass(frozen=True)
class Architecture:
    """A base model and the names of its modules."""

    name: str
    config: PreTrainedConfig
    attention: tuple[str, ...]
    """Adapted projections; where the base has biases at all, these have one."""
    further: tuple[str, ...]
    """The other linear layers."""
    whole: str
    """A module to train whole."""
    embedding: str = "embed_tokens"
    head: str = "lm_head"
    has_biases: bool = False
    is_tied: bool = False
    is_encoder_decoder: bool = False
    parameters: tuple[str, ...] = ()
    """Parameters of several experts, for target_parameters."""
    stores_experts_fused: bool = False
    held_in_fp32: str = "nothing"
    """Part of the names of parameters that the library holds in fp32 when it loads a model in float16, and saves so."""

    @property
    def auto(self) -> Any:
        """The class that loads it."""
        return AutoModelForSeq2SeqLM if self.is_encoder_decoder else AutoModelForCausalLM

    def save_base(self, directory: Path, dtype: torch.dtype, max_shard_size: str) -> Path:
        """Random weights, biases included."""
        torch.manual_seed(11)
        model: PreTrainedModel = self.auto.from_config(self.config, dtype=dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "bias" in name:
                    parameter.normal_(std=0.05)
        model.save_pretrained(directory, max_shard_size=max_shard_size, save_original_format=not self.stores_experts_fused)
        return directory

    def load(self, directory: Path, num_rows: int | None = None) -> PreTrainedModel:
        """Load the model in the dtype of its files. num_rows: number of rows to which the embeddings are resized."""
        model: PreTrainedModel = self.auto.from_pretrained(directory, dtype="auto")
        if num_rows is not None:
            model.resize_token_embeddings(num_rows)
        return model

    def logits(self, model: Any) -> torch.Tensor:
        """Return the logits of some tokens, including those with trained rows, in fp32 as (1, tokens, vocabulary)."""
        tokens = torch.tensor([[1, 5, 3, 9, 2, 44, 3, 1]])
        inputs = {"input_ids": tokens, **({"decoder_input_ids": tokens} if self.is_encoder_decoder else {})}
        with torch.no_grad():
            result: torch.Tensor = model.eval()(**inputs).logits.float()
        return result


_ATTENTION = ("q_proj", "k_proj", "v_proj")
_MLP = ("o_proj", "gate_proj", "up_proj", "down_proj")
_SIZES: dict[str, Any] = {
    "vocab_size": tiny.VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 300,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 64,
}
_T5 = T5Config(
    vocab_size=tiny.VOCABULARY, d_model=96, d_kv=24, d_ff=300, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0
)
_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")

ARCHITECTURES = (
    Architecture("llama", tiny.llama(), _ATTENTION, _MLP, "mlp"),
    Architecture("llama_tied", tiny.llama(tie_word_embeddings=True), _ATTENTION, _MLP, "norm", is_tied=True),
    Architecture("qwen2", tiny.qwen2(), _ATTENTION, _MLP, "mlp", has_biases=True, is_tied=True),
    Architecture("qwen3", Qwen3Config(**_SIZES), _ATTENTION, _MLP, "q_norm"),
    Architecture("gemma", GemmaConfig(**_SIZES), _ATTENTION, _MLP, "mlp", is_tied=True),
    Architecture("gpt2", tiny.gpt2(), ("c_attn",), ("c_proj", "c_fc"), "ln_1", embedding="wte", has_biases=True, is_tied=True),
    Architecture(
        "t5",
        _T5,
        ("q", "k", "v"),
        ("o", "wi", "wo"),
        "DenseReluDense",
        embedding="shared",
        is_tied=True,
        is_encoder_decoder=True,
        held_in_fp32=".wo.",
    ),
    Architecture("mixtral", moe.CONFIGS["mixtral"], _ATTENTION, ("o_proj",), "mlp", parameters=_EXPERTS),
    Architecture("qwen2_moe", moe.CONFIGS["qwen2_moe"], _ATTENTION, ("o_proj",), "shared_expert", parameters=_EXPERTS),
    Architecture("qwen3_moe", moe.CONFIGS["qwen3_moe"], _ATTENTION, ("o_proj",), "mlp", parameters=_EXPERTS),
    Architecture(
        "qwen3_moe_fused",
        moe.CONFIGS["qwen3_moe"],
        _ATTENTION,
        ("o_proj",),
        "mlp",
        parameters=_EXPERTS,
        stores_experts_fused=True,
    ),
)

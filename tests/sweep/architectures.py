"""Tiny base models of the sweep: every kind that stores, shares or names its parameters in another way.

Hidden sizes are multiples of 64, because bitsandbytes 0.50 unpacks 4-bit weights wrongly on some CPUs where 64 does not divide
the width of a row.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.support.tiny_model import END, VOCABULARY, write_tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NUM_EXPERTS = 4
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 256,
}


@dataclass(frozen=True)
class Architecture:
    """A base model, and the names of its parts that settings speak of."""

    config: PreTrainedConfig
    layer_class: str
    attention: tuple[str, ...]
    """Projections of one layer; where the model has biases, these have one."""
    norm: str
    embedding: str = "embed_tokens"
    head: str = "lm_head"
    has_biased_head: bool = False
    experts: tuple[str, ...] = ()
    """Parameters that hold all experts of a layer."""


_LLAMA = ("q_proj", "v_proj")
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(LlamaConfig(**_SIZES), "LlamaDecoderLayer", _LLAMA, "norm"),
    "llama_tied": Architecture(LlamaConfig(**_SIZES, tie_word_embeddings=True), "LlamaDecoderLayer", _LLAMA, "norm"),
    "llama_biased": Architecture(
        LlamaConfig(**_SIZES, attention_bias=True, mlp_bias=True), "LlamaDecoderLayer", _LLAMA, "norm"
    ),
    "qwen2": Architecture(Qwen2Config(**_SIZES, tie_word_embeddings=True), "Qwen2DecoderLayer", _LLAMA, "norm"),
    "qwen3": Architecture(Qwen3Config(**_SIZES, head_dim=16, tie_word_embeddings=True), "Qwen3DecoderLayer", _LLAMA, "q_norm"),
    "gemma": Architecture(GemmaConfig(**_SIZES, head_dim=16), "GemmaDecoderLayer", _LLAMA, "norm"),
    "gpt2": Architecture(
        GPT2Config(
            vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=256, bos_token_id=None, eos_token_id=256,
            attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        ),
        "GPT2Block", ("c_attn",), "ln_f", embedding="wte",
    ),
    "phi": Architecture(
        PhiConfig(**_SIZES, attention_dropout=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
        "PhiDecoderLayer", _LLAMA, "final_layernorm", has_biased_head=True,
    ),
    "phi3": Architecture(Phi3Config(**_SIZES), "Phi3DecoderLayer", ("qkv_proj",), "norm"),
    "mixtral": Architecture(
        MixtralConfig(**_SIZES, num_local_experts=NUM_EXPERTS), "MixtralDecoderLayer", _LLAMA, "norm",
        experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ),
    "qwen3_moe": Architecture(
        Qwen3MoeConfig(**_SIZES, num_experts=NUM_EXPERTS, num_experts_per_tok=2, moe_intermediate_size=64, head_dim=16),
        "Qwen3MoeDecoderLayer", _LLAMA, "norm", experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ),
    "mamba": Architecture(
        MambaConfig(
            vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, state_size=8, time_step_rank=4, bos_token_id=None,
            eos_token_id=256, pad_token_id=256,
        ),
        "MambaBlock", ("in_proj",), "norm_f", embedding="embeddings",
    ),
}  # fmt: skip


def write_base(directory: Path, architecture: str, dtype: str) -> None:
    """A base with random weights and biases and its tokenizer; the same bytes every time."""
    torch.manual_seed(11)
    model: Any = AutoModelForCausalLM.from_config(ARCHITECTURES[architecture].config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.05)
            elif parameter.dim() > 1 and not model._is_stateful:
                # A recurrent model would be chaotic: rounding to bfloat16 alone changes gradients by 0.19 of their norm, not
                # 0.008. Larger than usual, so that logits depend on every layer by far more than rounding.
                parameter.mul_(2)
        _choose_experts_clearly(model)
    model.to(DTYPES[dtype]).save_pretrained(directory)
    write_tokenizer(directory)
    # Tokenizers of some models have an unknown token, and where the files name none it is one more.
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "unk_token": END}))


def _choose_experts_clearly(model: Any) -> None:
    """Let tokens be of as many kinds as there are experts, and routers know them, as trained ones do.

    With random routers some of a few hundred tokens are always so near to a tie that rounding to 16 bits gives them other
    experts, whatever the routers' scale: the chosen two lead by 0.001 where they lead least. Here directions of their own say
    what kind a token is, no layer writes there, the chosen lead by 1.1 and more, and bounds need to know nothing of routers.
    """
    named = dict(model.named_parameters())
    routers = [parameter for name, parameter in named.items() if name.endswith("mlp.gate.weight")]
    if not routers:
        return
    embedding = model.get_input_embeddings().weight
    directions = torch.linalg.qr(torch.randn(embedding.shape[1], NUM_EXPERTS)).Q.T
    # More of the first kind, so that the mean of all rows, as which added tokens begin, is clearly of it, too.
    kinds = torch.tensor((0, 0, 1, 2, 0, 0, 1, 3)).repeat(embedding.shape[0] // 8)
    length = embedding.norm(dim=1, keepdim=True)
    embedding.sub_(embedding @ directions.T @ directions).add_(length * directions[kinds])
    for name, parameter in named.items():
        if name.endswith(("o_proj.weight", "down_proj", "down_proj.weight")):
            parameter.sub_(directions.T @ (directions @ parameter))
    wanted = torch.stack([torch.tensor((2.75, 2.0, -2.0, -2.75)).roll(kind) for kind in range(NUM_EXPERTS)])
    for router in routers:
        # Half of a token's square is its kind's, and normalisation gives each element a mean square of 1.
        router.copy_(wanted.T @ directions / (embedding.shape[1] / 2) ** 0.5)

"""The meaning of the size fields of a model's configuration, whose names differ between architectures.

Only sizes are listed. Other fields do not change, so the small model keeps the model's activation, norm, position encoding,
biases, scalings and special modules.
"""

from __future__ import annotations

import re
from enum import Enum


class Meaning(Enum):
    """The quantity that an integer field of a configuration counts."""

    LAYERS = "layers"
    HEADS = "attention heads"
    KEY_VALUE_HEADS = "key and value heads"
    HEAD_SIZE = "channels of a head"
    WIDTH = "channels of the residual stream"
    FEED_FORWARD = "channels of a feed-forward layer"
    RANK = "channels of a bottleneck"
    EXPERTS = "experts"
    EXPERT_GROUPS = "groups of experts"
    CHOSEN_EXPERTS = "experts of a token"
    CHOSEN_GROUPS = "groups of a token"
    VOCABULARY = "tokens"
    POSITIONS = "positions"
    WINDOW = "tokens that a token sees"
    STATE = "channels of a recurrent state"
    STATE_HEADS = "heads of a recurrent layer"
    STATE_HEAD_SIZE = "channels of a recurrent head"
    STATE_WIDTH = "channels inside a recurrent layer"
    STATE_GROUPS = "groups of recurrent heads"
    CHUNK = "tokens computed at once"
    LINEAR_KEY_HEADS = "key heads of linear attention"
    LINEAR_VALUE_HEADS = "value heads of linear attention"
    LINEAR_HEAD_SIZE = "channels of a head of linear attention"
    ROPE_SIZE = "rotated channels of a head"
    PLAIN_SIZE = "channels of a head that are not rotated"
    VALUE_SIZE = "channels of a value head"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MEANINGS: dict[Meaning, frozenset[str]] = {
    Meaning.LAYERS: _names(
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers depth num_decoder_layers num_encoder_layers "
        "conf_num_hidden_layers num_global_layers"
    ),
    Meaning.HEADS: _names(
        "num_attention_heads n_head n_heads decoder_attention_heads encoder_attention_heads attention_heads "
        "swa_num_attention_heads linear_num_heads num_decoder_attention_heads num_encoder_attention_heads "
        "conf_num_attention_heads"
    ),
    Meaning.KEY_VALUE_HEADS: _names("num_key_value_heads num_kv_heads kv_n_heads n_kv_heads swa_num_key_value_heads"),
    Meaning.HEAD_SIZE: _names(
        "head_dim kv_channels attention_head_size d_head dim_head swa_head_dim global_head_dim attention_head_dim d_kv"
    ),
    Meaning.WIDTH: _names("hidden_size n_embd d_model emb_dim"),
    Meaning.FEED_FORWARD: _names(
        "intermediate_size ffn_dim n_inner d_ff ffn_hidden_size moe_intermediate_size shared_expert_intermediate_size dff dim_ff "
        "shared_intermediate_size intermediate_size_mlp dense_intermediate_size encoder_ffn_dim decoder_ffn_dim block_ffn_dim "
        "feed_forward_size expert_ffn_hidden_size moe_shared_expert_intermediate_size shared_experts_intermediate_size mlp_dim "
        "moe_ffn_hidden_size d_inner router_hidden_size"
    ),
    Meaning.RANK: _names("q_lora_rank kv_lora_rank o_lora_rank laurel_rank adapter_rank gated_norm_rank"),
    Meaning.EXPERTS: _names("num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts"),
    Meaning.EXPERT_GROUPS: _names("n_group num_expert_group num_expert_groups moe_n_group"),
    Meaning.CHOSEN_EXPERTS: _names("num_experts_per_tok moe_topk moe_top_k moe_k num_experts_per_token top_k_experts"),
    Meaning.CHOSEN_GROUPS: _names("topk_group num_limited_groups"),
    Meaning.VOCABULARY: _names("vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size"),
    Meaning.POSITIONS: _names("max_position_embeddings n_positions n_ctx max_seq_len context_length model_max_length"),
    Meaning.WINDOW: _names(
        "sliding_window attention_chunk_size window_size attention_window_size sliding_window_size local_attention"
    ),
    Meaning.STATE: _names("state_size mamba_d_state ssm_state_size"),
    Meaning.STATE_HEADS: _names("mamba_n_heads n_mamba_heads mamba_num_heads"),
    Meaning.STATE_HEAD_SIZE: _names("mamba_d_head mamba_headdim mamba_head_dim"),
    Meaning.STATE_WIDTH: _names("mamba_d_ssm mamba_intermediate_size"),
    Meaning.STATE_GROUPS: _names("mamba_n_groups mamba_ngroups n_groups"),
    Meaning.CHUNK: _names("chunk_size mamba_chunk_size"),
    Meaning.LINEAR_KEY_HEADS: _names("linear_num_key_heads"),
    Meaning.LINEAR_VALUE_HEADS: _names("linear_num_value_heads"),
    Meaning.LINEAR_HEAD_SIZE: _names("linear_key_head_dim linear_value_head_dim linear_head_dim index_head_dim"),
    Meaning.ROPE_SIZE: _names("qk_rope_head_dim"),
    Meaning.PLAIN_SIZE: _names("qk_nope_head_dim"),
    Meaning.VALUE_SIZE: _names("v_head_dim"),
}
MEANING_OF: dict[str, Meaning] = {name: meaning for meaning, names in _MEANINGS.items() for name in names}

WIDTH_LIKE = re.compile(r"(^|_)(dim|size|width|hidden|embd|channels|d_\w+)($|_)")
"""Names of other fields that may hold a number of channels."""
NOT_A_WIDTH = re.compile(
    r"(kernel|image|patch|vocab|batch|window|chunk|block|pool|num_|position|token|merge|spatial|step|stride|crop)"
)
TOKEN_ID = re.compile(r"_token_(id|index)s?$")
LAYER_INDICES = re.compile(r"(layers|layer_ids|idxs|indices|indexes|_index)$")
"""Names of lists of layer numbers."""
PERIODS: dict[str, str | None] = {
    "decoder_sparse_step": None,
    "sliding_window_pattern": None,
    "_sliding_window_pattern": None,
    "attn_layer_period": "attn_layer_offset",
    "expert_layer_period": "expert_layer_offset",
    "interleave_moe_layer_step": None,
    "no_rope_layer_interval": None,
    "full_attention_interval": None,
    "global_attn_every_n_layers": None,
    "moe_layer_freq": None,
    "moe_layer_interval": None,
    "n_layers_per_attn_res_block": None,
    "layer_group_size": None,
    "prefix_dense_sliding_window_pattern": None,
}
"""Field that makes every n-th layer different -> the field that states the first such layer, or None."""
EXPLAINED_BY_TYPES = _names("sliding_window_pattern _sliding_window_pattern full_attention_interval no_rope_layer_interval")
"""Fields that are redundant if the configuration lists the type of each layer."""
FIRST_LAYERS = _names("first_k_dense_replace num_dense_layers max_window_layers moe_layer_start_index")
"""Fields that count layers at the start of the model."""
LAST_LAYERS = _names("num_kv_shared_layers")
"""Fields that count layers at the end of the model."""
LAST_INDEX = _names("moe_layer_end_index")
"""Fields that hold the index of the last layer."""

"""Lists a causal language model's parameters from its config.json: names, shapes and order are those of transformers' classes.

A family is a few functions of the configuration. Missing settings take the defaults of transformers' configuration classes.
Tests compare the lists with the real classes on the meta device at real sizes (tests/unit/finetune_memory/test_families.py).
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.resources import files
from typing import Any

from finetune_memory.model_shape import Kind, ParameterShape, UnknownModelError, text_config

MOST_LAYERS = 10_000
"""Maximum number of layers, above that of any model: a number from a file must not decide how long the listing takes."""
Config = Mapping[str, Any]
Entry = tuple[str, tuple[int, ...], Kind]


def base_parameters(config: Config, dtype: str) -> tuple[ParameterShape, ...]:
    """List the frozen parameters of the base model, held as `dtype`. Raises UnknownModelError for an unknown family."""
    kind = str(config.get("model_type"))
    family = PARAMETERS_BY_TYPE.get(kind)
    if family is None:
        raise UnknownModelError(
            f"config.json: model_type {kind!r} is not among those whose structure is known without the model "
            f"({', '.join(sorted(PARAMETERS_BY_TYPE))}); give --model the directory with its safetensors files"
        )
    text = text_config(config)
    layers = text.get("num_hidden_layers", text.get("n_layer"))
    if not isinstance(layers, int) or not 0 < layers <= MOST_LAYERS:
        raise UnknownModelError(f"config.json: num_hidden_layers is {layers!r}, not a whole number from 1 to {MOST_LAYERS}")
    try:
        entries = list(family(text))
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise UnknownModelError(f"config.json: a setting of {kind} is missing or has no usable value ({error!r})") from error
    return tuple(ParameterShape(name, shape, dtype, is_trained=False, kind=what) for name, shape, what in entries)


def layer_class(config: Config) -> str | None:
    """Return the class name of a model's layers, which `transformerLayerClsToWrap` may name; None for an unknown family."""
    return LAYER_CLASSES.get(str(config.get("model_type")))


def _linear(name: str, outputs: int, inputs: int, bias: bool = False) -> Iterator[Entry]:
    yield f"{name}.weight", (outputs, inputs), "linear"
    if bias:
        yield f"{name}.bias", (outputs,), "other"


def _norm(name: str, size: int, bias: bool = False) -> Iterator[Entry]:
    yield f"{name}.weight", (size,), "other"
    if bias:
        yield f"{name}.bias", (size,), "other"


def _heads(c: Config) -> tuple[int, int, int]:
    """Return the number of heads, the number of key-value heads, and the size of a head."""
    heads = c["num_attention_heads"]
    return heads, c.get("num_key_value_heads") or heads, c.get("head_dim") or c["hidden_size"] // heads


def _gated(name: str, hidden: int, width: int, bias: bool = False) -> Iterator[Entry]:
    yield from _linear(f"{name}.gate_proj", width, hidden, bias)
    yield from _linear(f"{name}.up_proj", width, hidden, bias)
    yield from _linear(f"{name}.down_proj", hidden, width, bias)


def _experts(name: str, count: int, hidden: int, width: int) -> Iterator[Entry]:
    yield f"{name}.gate_up_proj", (count, 2 * width, hidden), "other"
    yield f"{name}.down_proj", (count, hidden, width), "other"


def _attention(
    name: str, c: Config, *, qkv_bias: bool = False, out_bias: bool = False, out: str = "o_proj", norms: str = ""
) -> Iterator[Entry]:
    """List the parameters of attention. norms: "head" normalises each head's values, "all" those of all heads together."""
    hidden, (heads, shared, size) = c["hidden_size"], _heads(c)
    for projection, count in (("q_proj", heads), ("k_proj", shared), ("v_proj", shared)):
        yield from _linear(f"{name}.{projection}", count * size, hidden, qkv_bias)
    yield from _linear(f"{name}.{out}", hidden, heads * size, out_bias)
    if norms:
        yield from _norm(f"{name}.q_norm", size if norms == "head" else heads * size)
        yield from _norm(f"{name}.k_norm", size if norms == "head" else shared * size)


Layer = Callable[[str, int, Config], Iterator[Entry]]
Family = Callable[[Config], Iterator[Entry]]


def _model(c: Config, layer: Layer, *, tied: bool, norm_bias: bool = False, head_bias: bool = False) -> Iterator[Entry]:
    """List embedding, layers, final norm and head as in Llama. tied: whether the head is tied if config.json does not say."""
    yield "model.embed_tokens.weight", (c["vocab_size"], c["hidden_size"]), "embedding"
    for number in range(c["num_hidden_layers"]):
        yield from layer(f"model.layers.{number}", number, c)
    yield from _norm("model.norm", c["hidden_size"], norm_bias)
    if not c.get("tie_word_embeddings", tied):
        yield from _linear("lm_head", c["vocab_size"], c["hidden_size"], head_bias)


def _llama(
    *,
    tied: bool = False,
    qkv_bias: bool | str = False,
    out_bias: bool | str = False,
    mlp_bias: bool | str = False,
    norms: str = "",
    layer_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm"),
    mlp: str = "",
) -> Family:
    """Return a family that resembles Llama. A bias is True, False, or the name of the setting that decides."""

    def has(bias: bool | str, c: Config) -> bool:
        return bool(c.get(bias)) if isinstance(bias, str) else bias

    def layer(name: str, number: int, c: Config) -> Iterator[Entry]:
        yield from _attention(f"{name}.self_attn", c, qkv_bias=has(qkv_bias, c), out_bias=has(out_bias, c), norms=norms)
        if mlp:
            yield from _MLPS[mlp](f"{name}.mlp", number, c)
        else:
            yield from _gated(f"{name}.mlp", c["hidden_size"], c["intermediate_size"], has(mlp_bias, c))
        for norm in layer_norms:
            yield from _norm(f"{name}.{norm}", c["hidden_size"])

    return lambda c: _model(c, layer, tied=tied)


def _mixtral_mlp(name: str, _number: int, c: Config) -> Iterator[Entry]:
    count = c.get("num_local_experts") or c.get("num_experts") or 8
    yield f"{name}.gate.weight", (count, c["hidden_size"]), "other"
    yield from _experts(f"{name}.experts", count, c["hidden_size"], c["intermediate_size"])


def _qwen_moe_mlp(name: str, number: int, c: Config, *, default_experts: int, has_shared: bool) -> Iterator[Entry]:
    hidden, count = c["hidden_size"], c.get("num_experts", c.get("num_local_experts", default_experts))
    is_dense = number in (c.get("mlp_only_layers") or []) or count <= 0 or (number + 1) % c.get("decoder_sparse_step", 1) != 0
    if is_dense:
        yield from _gated(name, hidden, c["intermediate_size"])
        return
    router: Entry = (f"{name}.gate.weight", (count, hidden), "other")
    experts = _experts(f"{name}.experts", count, hidden, c["moe_intermediate_size"])
    if not has_shared:
        yield from (*experts, router)
        return
    yield from (router, *experts)
    yield from _gated(f"{name}.shared_expert", hidden, c["shared_expert_intermediate_size"])
    yield from _linear(f"{name}.shared_expert_gate", 1, hidden)


def _joined_mlp(name: str, _number: int, c: Config) -> Iterator[Entry]:
    yield from _linear(f"{name}.gate_up_proj", 2 * c["intermediate_size"], c["hidden_size"])
    yield from _linear(f"{name}.down_proj", c["hidden_size"], c["intermediate_size"])


def _phi3(c: Config) -> Iterator[Entry]:
    def layer(name: str, _number: int, c: Config) -> Iterator[Entry]:
        hidden, (heads, shared, size) = c["hidden_size"], _heads(c)
        yield from _linear(f"{name}.self_attn.o_proj", hidden, heads * size)
        yield from _linear(f"{name}.self_attn.qkv_proj", (heads + 2 * shared) * size, hidden)
        yield from _joined_mlp(f"{name}.mlp", _number, c)
        yield from _norm(f"{name}.input_layernorm", hidden)
        yield from _norm(f"{name}.post_attention_layernorm", hidden)

    return _model(c, layer, tied=False)


def _starcoder2(c: Config) -> Iterator[Entry]:
    bias = c.get("use_bias", True)

    def layer(name: str, _number: int, c: Config) -> Iterator[Entry]:
        hidden, width = c["hidden_size"], c["intermediate_size"]
        yield from _attention(f"{name}.self_attn", c, qkv_bias=bias, out_bias=bias)
        yield from _linear(f"{name}.mlp.c_fc", width, hidden, bias)
        yield from _linear(f"{name}.mlp.c_proj", hidden, width, bias)
        yield from _norm(f"{name}.input_layernorm", hidden, bias=True)
        yield from _norm(f"{name}.post_attention_layernorm", hidden, bias=True)

    return _model(c, layer, tied=True, norm_bias=True)


def _gpt2(c: Config) -> Iterator[Entry]:
    hidden = c["n_embd"]
    width = c.get("n_inner") or 4 * hidden
    yield "transformer.wte.weight", (c["vocab_size"], hidden), "embedding"
    yield "transformer.wpe.weight", (c.get("n_positions", 1024), hidden), "embedding"
    for number in range(c["n_layer"]):
        name = f"transformer.h.{number}"
        yield from _norm(f"{name}.ln_1", hidden, bias=True)
        # The first dimension of a Conv1D's weight is that of its inputs.
        for module, inputs, outputs in (("attn.c_attn", hidden, 3 * hidden), ("attn.c_proj", hidden, hidden)):
            yield f"{name}.{module}.weight", (inputs, outputs), "transposed"
            yield f"{name}.{module}.bias", (outputs,), "other"
        yield from _norm(f"{name}.ln_2", hidden, bias=True)
        for module, inputs, outputs in (("mlp.c_fc", hidden, width), ("mlp.c_proj", width, hidden)):
            yield f"{name}.{module}.weight", (inputs, outputs), "transposed"
            yield f"{name}.{module}.bias", (outputs,), "other"
    yield from _norm("transformer.ln_f", hidden, bias=True)
    if not c.get("tie_word_embeddings", True):
        yield from _linear("lm_head", c["vocab_size"], hidden)


def _gpt_neox(c: Config) -> Iterator[Entry]:
    hidden, width, bias = c["hidden_size"], c["intermediate_size"], c.get("attention_bias", True)
    yield "gpt_neox.embed_in.weight", (c["vocab_size"], hidden), "embedding"
    for number in range(c["num_hidden_layers"]):
        name = f"gpt_neox.layers.{number}"
        yield from _norm(f"{name}.input_layernorm", hidden, bias=True)
        yield from _norm(f"{name}.post_attention_layernorm", hidden, bias=True)
        yield from _linear(f"{name}.attention.query_key_value", 3 * hidden, hidden, bias)
        yield from _linear(f"{name}.attention.dense", hidden, hidden, bias)
        yield from _linear(f"{name}.mlp.dense_h_to_4h", width, hidden, bias=True)
        yield from _linear(f"{name}.mlp.dense_4h_to_h", hidden, width, bias=True)
    yield from _norm("gpt_neox.final_layer_norm", hidden, bias=True)
    if not c.get("tie_word_embeddings", False):
        yield from _linear("lm_head", c["vocab_size"], hidden)


def _deepseek(c: Config) -> Iterator[Entry]:
    """List DeepSeek's parameters: multi-head latent attention (arXiv:2405.04434), dense first layers, then experts."""

    def layer(name: str, number: int, c: Config) -> Iterator[Entry]:
        hidden, heads, rank, bias = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"], bool(c.get("attention_bias"))
        plain, rotated, values = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        attention, size = f"{name}.self_attn", plain + rotated
        if c.get("q_lora_rank"):
            yield from _linear(f"{attention}.q_a_proj", c["q_lora_rank"], hidden, bias)
            yield from _norm(f"{attention}.q_a_layernorm", c["q_lora_rank"])
            yield from _linear(f"{attention}.q_b_proj", heads * size, c["q_lora_rank"])
        else:
            yield from _linear(f"{attention}.q_proj", heads * size, hidden)
        yield from _linear(f"{attention}.kv_a_proj_with_mqa", rank + rotated, hidden, bias)
        yield from _norm(f"{attention}.kv_a_layernorm", rank)
        yield from _linear(f"{attention}.kv_b_proj", heads * (plain + values), rank)
        yield from _linear(f"{attention}.o_proj", hidden, heads * values, bias)
        if number < c.get("first_k_dense_replace", 3):
            yield from _gated(f"{name}.mlp", hidden, c["intermediate_size"])
        else:
            width, count = c["moe_intermediate_size"], c.get("n_routed_experts") or c["num_local_experts"]
            yield from _experts(f"{name}.mlp.experts", count, hidden, width)
            yield f"{name}.mlp.gate.weight", (count, hidden), "other"
            yield from _gated(f"{name}.mlp.shared_experts", hidden, width * c["n_shared_experts"])
        yield from _norm(f"{name}.input_layernorm", hidden)
        yield from _norm(f"{name}.post_attention_layernorm", hidden)

    return _model(c, layer, tied=False)


_MLPS: Mapping[str, Layer] = {
    "joined": _joined_mlp,
    "mixtral": _mixtral_mlp,
    "qwen2_moe": partial(_qwen_moe_mlp, default_experts=60, has_shared=True),
    "qwen3_moe": partial(_qwen_moe_mlp, default_experts=128, has_shared=False),
}
_UNLIKE_LLAMA: Mapping[str, Family] = {
    "phi3": _phi3,
    "starcoder2": _starcoder2,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
_FAMILIES: dict[str, dict[str, Any]] = tomllib.loads(files("finetune_memory").joinpath("families.toml").read_text())
LAYER_CLASSES: Mapping[str, str] = {kind: settings.pop("class") for kind, settings in _FAMILIES.items()}
"""Maps a `model_type` to the class name of the model's layers, which are FSDP units by default."""
PARAMETERS_BY_TYPE: Mapping[str, Family] = {
    kind: _UNLIKE_LLAMA[kind] if kind in _UNLIKE_LLAMA else _llama(**settings) for kind, settings in _FAMILIES.items()
}
"""Maps a `model_type` to the function that lists the model's parameters."""

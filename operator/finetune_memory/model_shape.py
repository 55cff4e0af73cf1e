"""What an estimate starts from: names, shapes and element types of a model as a rank holds it, facts of its code, and a batch.

A model is described from config.json alone (families.py, adapters.py), from the headers of weight files, or by preflight from
the real model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from finetune_job.plan.element_types import VALUE_BYTES

Kind = Literal["linear", "transposed", "embedding", "other"]
"""What it is the weight of: torch's linear layer [outputs, inputs], transformers' Conv1D [inputs, outputs], an embedding."""
LINEAR = ("linear", "transposed")
WHOLE_LOGITS = frozenset({"gemma2", "cohere", "cohere2", "granite", "granitemoe", "granitemoeshared"})
"""Models whose configuration may leave out the setting that changes their logits, because it is the class's default."""
CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
"""What architectures call the number of experts that a token has."""
EXPERTS_PER_TOKEN = {"qwen2_moe": 4, "qwen3_moe": 8, "olmoe": 8, "gpt_oss": 4, "deepseek_v3": 8, "deepseek_v2": 2}
ACTIVATIONS = {"gpt2": "gelu_new", "gemma": "gelu_pytorch_tanh", "gemma2": "gelu_pytorch_tanh",
               "gemma3_text": "gelu_pytorch_tanh", "starcoder2": "gelu_pytorch_tanh",
               "gpt_neox": "gelu", "phi": "gelu_new", "opt": "relu"}  # fmt: skip
DROPOUTS = {"gpt2": 0.1}
"""Defaults of transformers' configuration classes that differ from the usual 2 experts, silu and no dropout."""
EAGER_ONLY = frozenset({
    "bloom", "codegen", "deepseek_v4", "falcon_mamba", "flint", "gemma2", "gpt_neo", "gpt_neox_japanese", "gpt_oss", "gptj",
    "granite_swa", "granitemoe_swa", "hy_v4", "inkling2_text", "mamba", "mamba2", "mimo_v2_flash", "mpt", "openai-gpt",
    "vaultgemma", "xglm", "xlm", "xlnet", "xlstm",
})  # fmt: skip
"""Decoders for which the pinned transformers has no SDPA (`_supports_sdpa` of their classes)."""
CONVERTED = frozenset({"gpt_neox", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"})
"""Of the families that are known without the model: transformers renames tensors or stacks experts while it loads them."""
LEARNT_POSITIONS = frozenset({"gpt2", "opt", "gpt_bigcode", "bloom"})
LENGTH_MULTIPLE = 8
"""Rows are padded to a multiple of this many tokens: matrix products on tensor cores are fast for such lengths."""


class UnknownModelError(Exception):
    """The structure does not follow from what is at hand; the text says what would help."""


@dataclass(frozen=True)
class ParameterShape:
    """One parameter, tied ones once."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """torch's name of the element type in which it is held."""
    is_trained: bool
    kind: Kind = "other"

    @cached_property
    def numel(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @cached_property
    def num_bytes(self) -> int:
        """Unsharded."""
        return self.numel * VALUE_BYTES[self.dtype]

    @property
    def module(self) -> str:
        """Name of the module that holds it."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class ArchitectureFacts:
    """What shapes do not tell and activations depend on."""

    hidden_size: int
    num_heads: int
    num_key_value_heads: int
    head_size: int
    """Of queries and keys."""
    value_head_size: int
    vocabulary_size: int
    experts_per_token: int
    activation: str
    attention_dropout: float
    residual_dropout: float
    score_softcap: bool
    """Whether attention scores are capped by a tanh, which eager attention keeps."""
    has_whole_logits: bool
    """Whether the model changes its logits, so that they cannot be computed a few rows at a time."""
    rotates_positions: bool
    """Whether queries and keys are rotated, which copies them."""
    has_fused_attention: bool
    """Whether transformers has torch's fused attention (SDPA) for this architecture; without it the trainer takes the eager
    one."""
    is_stored_otherwise: bool
    """Whether the files hold other tensors than the model has parameters, such as each expert alone, or transformers holds
    some in float32 and others not: every rank reads them all."""


@dataclass(frozen=True)
class ModelShape:
    """A model as one rank builds it, before it is sharded."""

    parameters: tuple[ParameterShape, ...]
    """In the order of `named_parameters()`, adapters included."""
    units: tuple[str, ...]
    """Names of the modules that are FSDP units of their own; the root is one besides."""
    facts: ArchitectureFacts
    constant_bytes: int = 0
    """What every rank holds whole in addition to parameters: buffers, and the scales of 4-bit weights."""

    @property
    def num_trained(self) -> int:
        """Values that are trained."""
        return sum(each.numel for each in self.parameters if each.is_trained)


def facts_of(
    config: Mapping[str, Any],
    *,
    has_whole_logits: bool | None = None,
    has_fused_attention: bool | None = None,
    is_stored_otherwise: bool | None = None,
) -> ArchitectureFacts:
    """From config.json (of the text part, where a model has several). Raises UnknownModelError.

    What stands behind `config` preflight has found out; None: by the settings that scale or cap logits, and by the architecture's
    name.
    """
    text = text_config(config)
    kind = text.get("model_type")
    try:
        return _facts(
            text,
            has_whole_logits,
            has_fused_attention=kind not in EAGER_ONLY if has_fused_attention is None else has_fused_attention,
            is_stored_otherwise=kind in CONVERTED if is_stored_otherwise is None else is_stored_otherwise,
        )
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise UnknownModelError(f"config.json: a size is not a whole number above 0 ({error})") from error


def _facts(text: Mapping[str, Any], has_whole_logits: bool | None, **known: bool) -> ArchitectureFacts:
    hidden, heads = _first(text, "hidden_size", "n_embd", "d_model"), _first(text, "num_attention_heads", "n_head", "num_heads")
    vocabulary = _first(text, "vocab_size")
    if not all(isinstance(size, int) and size > 0 for size in (hidden, heads, vocabulary)):
        raise UnknownModelError(
            "config.json names no hidden_size, num_attention_heads and vocab_size; preflight, which builds the model, "
            "estimates it"
        )
    head_size = _first(text, "head_dim") or hidden // heads
    if text.get("kv_lora_rank"):
        head_size = (text.get("qk_nope_head_dim") or 0) + (text.get("qk_rope_head_dim") or 0)
    if has_whole_logits is None:
        has_whole_logits = bool(text.get("final_logit_softcapping")) or "logit_scale" in text or "logits_scaling" in text
        has_whole_logits = has_whole_logits or text.get("model_type") in WHOLE_LOGITS
    kind = str(text.get("model_type", ""))
    return ArchitectureFacts(
        hidden_size=hidden,
        num_heads=heads,
        num_key_value_heads=(heads if text.get("kv_lora_rank") else _first(text, "num_key_value_heads")) or heads,
        head_size=head_size,
        value_head_size=(text.get("v_head_dim") if text.get("kv_lora_rank") else None) or head_size,
        vocabulary_size=vocabulary,
        experts_per_token=_most(_first(text, *CHOSEN_EXPERTS)) or EXPERTS_PER_TOKEN.get(kind, 2),
        activation=str(
            text.get("hidden_activation")
            or text.get("hidden_act")
            or text.get("activation_function")
            or ACTIVATIONS.get(kind, "silu")
        ),
        attention_dropout=float(
            _first(text, "attention_dropout", "attn_pdrop") or DROPOUTS.get(kind, 0.0) * ("attn_pdrop" not in text)
        ),
        residual_dropout=float(
            _first(text, "resid_pdrop", "residual_dropout", "hidden_dropout")
            or DROPOUTS.get(kind, 0.0) * ("resid_pdrop" not in text)
        ),
        score_softcap=bool(text.get("attn_logit_softcapping")),
        has_whole_logits=has_whole_logits,
        rotates_positions=kind not in LEARNT_POSITIONS,
        **known,
    )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration that describes the language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def _first(config: Mapping[str, Any], *names: str) -> Any:
    """The value of the first of these settings that stands there and is not null."""
    return next((config[name] for name in names if config.get(name) is not None), None)


def _most(value: Any) -> Any:
    """Of a setting that may hold a number for each layer, the largest."""
    return max(value, default=None) if isinstance(value, list) else value


@dataclass(frozen=True)
class Workload:
    """One micro-batch of one rank."""

    rows: int
    length: int
    """Tokens of a row, padding included."""
    has_mask: bool
    """Whether attention needs a mask: rows of several documents, or padded ones."""
    on_gpu: bool

    @property
    def tokens(self) -> int:
        """Of all rows."""
        return self.rows * self.length

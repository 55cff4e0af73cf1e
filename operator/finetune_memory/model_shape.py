"""The input of an estimate: names, shapes and element types of a model as a rank holds it, facts of its code, and a batch.

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
"""The kind of a weight: torch's linear layer [outputs, inputs], transformers' Conv1D [inputs, outputs], embedding, other."""
LINEAR = ("linear", "transposed")
WHOLE_LOGITS = frozenset({"gemma2", "cohere", "cohere2", "granite", "granitemoe", "granitemoeshared"})
"""Models that change their logits by default: their configuration need not contain the setting that does so."""
CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
"""Names that configurations use for the number of experts per token."""
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
"""Families whose tensors transformers renames, or whose experts it stacks, while loading; used if a model's files are missing."""
LEARNT_POSITIONS = frozenset({"gpt2", "opt", "gpt_bigcode", "bloom"})
LENGTH_MULTIPLE = 8
"""Rows are padded to a multiple of this many tokens: matrix products on tensor cores are fast for such lengths."""


class UnknownModelError(Exception):
    """The structure of the model cannot be derived from the files at hand; the message says what would help."""


@dataclass(frozen=True)
class ParameterShape:
    """One parameter; tied parameters are listed once."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """torch's name for the parameter's element type."""
    is_trained: bool
    kind: Kind = "other"

    @cached_property
    def numel(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the whole parameter, unsharded."""
        return self.numel * VALUE_BYTES[self.dtype]

    @property
    def module(self) -> str:
        """Name of the module that holds the parameter."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class ArchitectureFacts:
    """Properties of a model's code that determine its activations and cannot be seen from shapes."""

    hidden_size: int
    num_heads: int
    num_key_value_heads: int
    head_size: int
    """Size of queries and keys of one head."""
    value_head_size: int
    vocabulary_size: int
    experts_per_token: int
    activation: str
    attention_dropout: float
    residual_dropout: float
    score_softcap: bool
    """Whether attention scores are capped by a tanh, whose result eager attention keeps."""
    has_whole_logits: bool
    """Whether the model changes its logits, so they cannot be computed a few rows at a time."""
    rotates_positions: bool
    """Whether queries and keys are rotated, which copies them."""
    has_fused_attention: bool
    """Whether transformers has torch's fused attention (SDPA) for this architecture; if not, the trainer uses eager attention."""
    is_stored_otherwise: bool
    """Whether every rank must read all tensors of the files, because they are not the model's own parameters (such as single
    experts), or because transformers holds only some of them in float32."""


@dataclass(frozen=True)
class ModelShape:
    """A model as one rank builds it, before it is sharded."""

    parameters: tuple[ParameterShape, ...]
    """All parameters in the order of `named_parameters()`, adapters included."""
    units: tuple[str, ...]
    """Names of the modules that are FSDP units of their own; the root is one more unit."""
    facts: ArchitectureFacts
    constant_bytes: int = 0
    """Bytes that every rank holds in full in addition to parameters: buffers, and the scales of 4-bit weights."""

    @property
    def num_trained(self) -> int:
        """Number of trained values."""
        return sum(parameter.numel for parameter in self.parameters if parameter.is_trained)


def facts_of(
    config: Mapping[str, Any],
    *,
    has_whole_logits: bool | None = None,
    has_fused_attention: bool | None = None,
    is_stored_otherwise: bool | None = None,
) -> ArchitectureFacts:
    """Read the facts from config.json (from its text part if it has several). Raises UnknownModelError.

    Preflight passes the keyword arguments; those that are None are derived from the settings that scale or cap logits and from
    the architecture's name.
    """
    text = text_config(config)
    kind = str(text.get("model_type", ""))
    known = {
        "has_fused_attention": kind not in EAGER_ONLY if has_fused_attention is None else has_fused_attention,
        "is_stored_otherwise": kind in CONVERTED if is_stored_otherwise is None else is_stored_otherwise,
    }
    if has_whole_logits is None:
        changes_logits = bool(text.get("final_logit_softcapping")) or "logit_scale" in text or "logits_scaling" in text
        has_whole_logits = changes_logits or kind in WHOLE_LOGITS
    try:
        return _facts(text, kind, has_whole_logits=has_whole_logits, **known)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise UnknownModelError(f"config.json: a size is not a whole number above 0 ({error})") from error


def _facts(text: Mapping[str, Any], kind: str, **known: bool) -> ArchitectureFacts:
    hidden, heads = _first(text, "hidden_size", "n_embd", "d_model"), _first(text, "num_attention_heads", "n_head", "num_heads")
    vocabulary = _first(text, "vocab_size")
    if not all(isinstance(size, int) and size > 0 for size in (hidden, heads, vocabulary)):
        raise UnknownModelError(
            "config.json names no hidden_size, num_attention_heads and vocab_size; preflight, which builds the model, "
            "estimates it"
        )
    head_size = value_size = _first(text, "head_dim") or hidden // heads
    shared_heads = _first(text, "num_key_value_heads") or heads
    if text.get("kv_lora_rank"):
        head_size = (text.get("qk_nope_head_dim") or 0) + (text.get("qk_rope_head_dim") or 0)
        value_size, shared_heads = text.get("v_head_dim") or head_size, heads
    experts, dropout = _first(text, *CHOSEN_EXPERTS), DROPOUTS.get(kind, 0.0)
    if isinstance(experts, list):  # a number for each layer
        experts = max(experts, default=None)
    activation = text.get("hidden_activation") or text.get("hidden_act") or text.get("activation_function")
    of_attention = _first(text, "attention_dropout", "attn_pdrop") or dropout * ("attn_pdrop" not in text)
    of_residual = _first(text, "resid_pdrop", "residual_dropout", "hidden_dropout") or dropout * ("resid_pdrop" not in text)
    return ArchitectureFacts(
        hidden_size=hidden,
        num_heads=heads,
        num_key_value_heads=shared_heads,
        head_size=head_size,
        value_head_size=value_size,
        vocabulary_size=vocabulary,
        experts_per_token=experts or EXPERTS_PER_TOKEN.get(kind, 2),
        activation=str(activation or ACTIVATIONS.get(kind, "silu")),
        attention_dropout=float(of_attention),
        residual_dropout=float(of_residual),
        score_softcap=bool(text.get("attn_logit_softcapping")),
        rotates_positions=kind not in LEARNT_POSITIONS,
        **known,
    )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a configuration that describes the language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def _first(config: Mapping[str, Any], *names: str) -> Any:
    """Return the value of the first of these settings that is set and not null."""
    return next((config[name] for name in names if config.get(name) is not None), None)


@dataclass(frozen=True)
class Workload:
    """One micro-batch of one rank."""

    rows: int
    length: int
    """Number of tokens in a row, including padding."""
    has_mask: bool
    """Whether attention needs a mask: rows of several documents, or padded ones."""
    on_gpu: bool

    @property
    def tokens(self) -> int:
        """Number of tokens in all rows."""
        return self.rows * self.length

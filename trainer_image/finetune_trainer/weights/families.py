"""How model types of transformers 5.23 name their parameters in files, and which of them share memory.

Importing transformers takes seconds and hundreds of megabytes, which a plain merge must not pay. So the common types are written
down here (a test holds them against the library), and library_names.py asks the library about every other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from finetune_trainer.weights.name_rules import ExpertStack, NameRule, Renaming


@dataclass(frozen=True)
class Family:
    """What StoredModel has to know of a model type."""

    prefix: str = "model"
    """Name of the model inside the one with a head, which files saved without the head leave out. Empty: there is none."""
    ties: Mapping[str, str] = field(default_factory=lambda: {"lm_head.weight": "model.embed_tokens.weight"})
    """Parameter -> the one that it shares its memory with, where config.json has tie_word_embeddings."""
    ties_by_default: bool = False
    """What a config.json without tie_word_embeddings means."""
    always_tied: bool = False
    """Whether the library ties whatever config.json says."""
    held_in_fp32: frozenset[str] = frozenset()
    """Modules, by the last part of their names, whose parameters the library holds in fp32 when it loads a model in float16."""
    rules: tuple[NameRule, ...] = ()
    """In the order in which they apply: every renaming, then at most one of the others."""
    has_transposed_experts: bool = False
    """Whether parameters of experts are (experts, in, out) rather than (experts, out, in)."""
    part: frozenset[str] | None = None
    """Parameters of the part that is trained, where files hold a model of more than text."""
    peft_fuses_experts: bool = False
    """Whether PEFT 0.21 turns adapters on single experts, as older versions saved them, into adapters on the fused parameters."""

    def is_tied(self, config: Mapping[str, Any]) -> bool:
        """Whether transformers ties the embeddings of a model with this config.json, as long as their values agree."""
        stated = config.get("tie_word_embeddings")
        return self.always_tied or bool(self.ties_by_default if stated is None else stated)


LEGACY: tuple[NameRule, ...] = (
    Renaming(("LayerNorm.gamma",), "LayerNorm.weight"),
    Renaming(("LayerNorm.beta",), "LayerNorm.bias"),
    Renaming((".weight_g",), ".parametrizations.weight.original0"),
    Renaming((".weight_v",), ".parametrizations.weight.original1"),
    Renaming((r"^model\.language_model\.model", r"^language_model\.model\.model"), "model.language_model"),
)
"""Names of old checkpoints of any type; applied after a family's own."""

QWEN_EXPERTS: tuple[NameRule, ...] = (
    ExpertStack(("mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"), "mlp.experts.gate_up_proj"),
    ExpertStack(("mlp.experts.*.down_proj.weight",), "mlp.experts.down_proj"),
)
MIXTRAL_EXPERTS: tuple[NameRule, ...] = (
    Renaming((".block_sparse_moe.",), ".mlp."),
    ExpertStack((".experts.*.w1.weight", ".experts.*.w3.weight"), ".experts.gate_up_proj"),
    ExpertStack((".experts.*.w2.weight",), ".experts.down_proj"),
)

_WTE = {"lm_head.weight": "transformer.wte.weight"}
_WORD_EMBEDDINGS = {"lm_head.weight": "transformer.word_embeddings.weight"}
_SHARED = {
    "encoder.embed_tokens.weight": "shared.weight",
    "decoder.embed_tokens.weight": "shared.weight",
    "lm_head.weight": "shared.weight",
}

FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(
        ("apertus", "arcee", "exaone4", "glm", "glm4", "granite", "helium", "llama", "ministral3", "mistral",
         "olmo", "olmo2", "olmo3", "persimmon", "phi", "phi3", "qwen2", "qwen3", "seed_oss", "stablelm"),
        Family(),
    ),
    **dict.fromkeys(
        ("cohere", "cohere2", "ernie4_5", "gemma", "gemma2", "gemma3_text", "smollm3", "starcoder2"), Family(ties_by_default=True)
    ),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "mpt"), Family("transformer", _WTE, ties_by_default=True)),
    **dict.fromkeys(("codegen", "gptj"), Family("transformer", _WTE)),
    **dict.fromkeys(("bloom", "falcon"), Family("transformer", _WORD_EMBEDDINGS, ties_by_default=True)),
    "gpt_neox": Family(
        "gpt_neox", {"lm_head.weight": "gpt_neox.embed_in.weight"}, rules=(Renaming((r"^embed_out\.",), "lm_head."),)
    ),
    "opt": Family(ties={"lm_head.weight": "model.decoder.embed_tokens.weight"}, ties_by_default=True),
    **dict.fromkeys(
        ("longt5", "mt5", "t5", "umt5"),
        Family("", _SHARED, ties_by_default=True, always_tied=True, held_in_fp32=frozenset({"wo"})),
    ),
    "gpt_oss": Family(has_transposed_experts=True),
    "mixtral": Family(rules=MIXTRAL_EXPERTS, peft_fuses_experts=True),
    "phimoe": Family(rules=(MIXTRAL_EXPERTS[0], Renaming((".gate.weight",), ".router.weight"), *MIXTRAL_EXPERTS[1:])),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "flex_olmo", "glm4_moe", "olmoe", "qwen3_moe"),
        Family(rules=QWEN_EXPERTS, peft_fuses_experts=True),
    ),
    "qwen2_moe": Family(rules=QWEN_EXPERTS),
}  # fmt: skip
"""By model_type. What is not here, library_names.py finds out."""

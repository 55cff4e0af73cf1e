"""How each transformers model type names its parameters in files, and which parameters share memory.

Importing transformers takes seconds and hundreds of megabytes, which an ordinary merge should not need. So common types are
listed here (a test compares them with the library), and the library is imported only for other types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from finetune_trainer.weights.name_rules import ExpertStack, NameRule, Renaming, Unreadable

TIE_FIELD = "tie_word_embeddings"
VOCABULARY_FIELD = "vocab_size"


@dataclass(frozen=True)
class ModelFamily:
    """The properties of a model type that StoredModel needs."""

    prefix: str = "model"
    """Name of the inner model in a model with a head. Files saved without the head lack this prefix. Empty: no inner model."""
    ties: Mapping[str, str] = field(default_factory=lambda: {"lm_head.weight": "model.embed_tokens.weight"})
    """Parameter -> the parameter with which it shares memory if the embeddings are tied (`is_tied`)."""
    ties_by_default: bool = False
    """Whether the embeddings are tied if config.json does not set tie_word_embeddings."""
    always_tied: bool = False
    """Whether the library ties the embeddings whatever config.json says."""
    held_in_fp32: frozenset[str] = frozenset()
    """Last parts of the names of modules that the library keeps in fp32 when it loads a model in float16."""
    rules: tuple[NameRule, ...] = ()
    """Rules in the order in which they apply: all renamings, then at most one rule of another kind."""
    has_transposed_experts: bool = False
    """Whether parameters of experts have the shape (experts, in, out), not (experts, out, in)."""
    part: frozenset[str] | None = None
    """Parameters of the trained part, if the files hold more than a text model; otherwise None."""
    peft_fuses_experts: bool = False
    """Whether PEFT 0.21 turns adapters of single experts, which older versions saved, into adapters of fused parameters."""

    def is_tied(self, config: Mapping[str, Any]) -> bool:
        """Whether transformers ties the embeddings of a model with this config.json, if their values agree."""
        stated = config.get("tie_word_embeddings")
        return self.always_tied or bool(self.ties_by_default if stated is None else stated)


LEGACY_NAME_RULES: tuple[NameRule, ...] = (
    Renaming(("LayerNorm.gamma",), "LayerNorm.weight"),
    Renaming(("LayerNorm.beta",), "LayerNorm.bias"),
    Renaming((".weight_g",), ".parametrizations.weight.original0"),
    Renaming((".weight_v",), ".parametrizations.weight.original1"),
    Renaming((r"^model\.language_model\.model", r"^language_model\.model\.model"), "model.language_model"),
)
"""Rules for names in old checkpoints of any type. They apply after a family's own rules."""

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

FAMILIES: Mapping[str, ModelFamily] = {
    **dict.fromkeys(
        ("apertus", "arcee", "exaone4", "glm", "glm4", "granite", "helium", "llama", "ministral3", "mistral",
         "olmo", "olmo2", "olmo3", "persimmon", "phi", "phi3", "qwen2", "qwen3", "seed_oss", "stablelm"),
        ModelFamily(),
    ),
    **dict.fromkeys(
        ("cohere", "cohere2", "ernie4_5", "gemma", "gemma2", "gemma3_text", "smollm3", "starcoder2"),
        ModelFamily(ties_by_default=True),
    ),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "mpt"), ModelFamily("transformer", _WTE, ties_by_default=True)),
    **dict.fromkeys(("codegen", "gptj"), ModelFamily("transformer", _WTE)),
    **dict.fromkeys(("bloom", "falcon"), ModelFamily("transformer", _WORD_EMBEDDINGS, ties_by_default=True)),
    "gpt_neox": ModelFamily(
        "gpt_neox", {"lm_head.weight": "gpt_neox.embed_in.weight"}, rules=(Renaming((r"^embed_out\.",), "lm_head."),)
    ),
    "opt": ModelFamily(ties={"lm_head.weight": "model.decoder.embed_tokens.weight"}, ties_by_default=True),
    **dict.fromkeys(
        ("longt5", "mt5", "t5", "umt5"),
        ModelFamily("", _SHARED, ties_by_default=True, always_tied=True, held_in_fp32=frozenset({"wo"})),
    ),
    "gpt_oss": ModelFamily(has_transposed_experts=True),
    "mixtral": ModelFamily(rules=MIXTRAL_EXPERTS, peft_fuses_experts=True),
    "phimoe": ModelFamily(rules=(MIXTRAL_EXPERTS[0], Renaming((".gate.weight",), ".router.weight"), *MIXTRAL_EXPERTS[1:])),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "flex_olmo", "glm4_moe", "olmoe", "qwen3_moe"),
        ModelFamily(rules=QWEN_EXPERTS, peft_fuses_experts=True),
    ),
    "qwen2_moe": ModelFamily(rules=QWEN_EXPERTS),
}  # fmt: skip
"""Families by model_type. Types that are not listed are looked up in transformers (library_family)."""


def tie_settings(config: Mapping[str, Any], *, is_tied: bool) -> dict[str, Any]:
    """Return the settings of config.json that say whether the embeddings are tied."""
    changes: dict[str, Any] = {TIE_FIELD: is_tied}
    text = config.get("text_config")
    if isinstance(text, Mapping) and TIE_FIELD in text:
        changes["text_config"] = {**text, TIE_FIELD: is_tied}
    return changes


def vocabulary_settings(config: Mapping[str, Any], num_rows: int) -> dict[str, Any]:
    """Return config.json's settings for this number of embedding rows, as transformers' resize_token_embeddings sets them."""
    text = config.get("text_config")
    changes: dict[str, Any] = {"text_config": {**text, VOCABULARY_FIELD: num_rows}} if isinstance(text, Mapping) else {}
    return changes | ({} if changes and VOCABULARY_FIELD not in config else {VOCABULARY_FIELD: num_rows})


def family_of(config: Mapping[str, Any], stored: Mapping[str, Any]) -> ModelFamily:
    """Return the family of a model. stored: tensors by name. Raises ImportError if transformers is needed but not installed."""
    model_type = config.get("model_type")
    if model_type in FAMILIES:
        return FAMILIES[str(model_type)]
    family = library_family(config) if model_type else None
    # For a type that the library does not know: without a stored output embedding, the embeddings must be tied.
    return family or ModelFamily(ties_by_default="lm_head.weight" not in stored)


def library_family(config: Mapping[str, Any]) -> ModelFamily | None:
    """Return the family according to transformers; None for an unknown type, whose model has its own code."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping

    model_type = str(config["model_type"])
    if model_type not in CONFIG_MAPPING:
        return None
    from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN, _MOE_FUSED_TARGETS

    plain = _with_floats({name: value for name, value in config.items() if name != "quantization_config"})
    model_config = CONFIG_MAPPING[model_type].from_dict(plain)
    # In a multimodal model only the text part is trained. It may have a class and names of its own.
    is_part = model_config.get_text_config() is not model_config and type(model_config) in AutoModelForCausalLM._model_mapping  # noqa: SLF001
    model = _structure(plain, is_part=is_part)
    ties = _ties(model)
    # Setting tie_word_embeddings to false unties every shared tensor, not only the embeddings. In Zamba 2 whole layers are
    # shared and must not be written twice, so only a model with a single tie can store its tensors separately.
    can_part = len(ties) == 1 and not _ties(_structure(plain | tie_settings(plain, is_tied=False), is_part=is_part))
    inner = getattr(model, model.base_model_prefix, None)
    return ModelFamily(
        prefix=model.base_model_prefix if inner is not None and inner is not model else "",
        # If nothing is tied but config.json could tie the embeddings, this is the pair that it could tie.
        ties=ties or (_embeddings(model) if not config.get(TIE_FIELD) else {}),
        ties_by_default=bool(ties),
        always_tied=bool(ties) and (not can_part or config.get(TIE_FIELD) is False),
        rules=(
            *(_rule(transform) for transform in get_model_conversion_mapping(model, add_legacy=False)),
            *([Renaming((rf"^{model.base_model_prefix}\.",), "")] if is_part and inner is None else []),
        ),
        part=frozenset(name for name, _ in model.named_parameters(remove_duplicate=False)) if is_part else None,
        has_transposed_experts=any(getattr(module, "is_transposed", False) for module in model.modules()),
        # PEFT decides this by the same tables.
        peft_fuses_experts=_MODEL_TO_CONVERSION_PATTERN.get(model_type) in _MOE_FUSED_TARGETS,
    )


def _structure(config: Mapping[str, Any], *, is_part: bool) -> Any:
    """Build the model that transformers builds from config.json, without weights."""
    import torch
    import transformers
    from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

    model_config = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    architecture = getattr(transformers, (config.get("architectures") or [""])[0], None)
    with torch.device("meta"):
        if architecture is not None and not is_part:
            return architecture(model_config)
        kinds = (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForImageTextToText, AutoModel)
        kind = next(kind for kind in kinds if type(model_config) in kind._model_mapping)  # noqa: SLF001 - no public name
        return kind.from_config(model_config)


def _ties(model: Any) -> dict[str, str]:
    """Return each tied parameter -> the parameter with which it shares memory."""
    return dict(model.get_expanded_tied_weights_keys(all_submodels=True))


def _embeddings(model: Any) -> dict[str, str]:
    """Return output embedding -> input embedding, a pair that could be tied; empty unless the model has both."""
    names = {id(module): name for name, module in model.named_modules()}
    parts = [names.get(id(module)) for module in (model.get_output_embeddings(), model.get_input_embeddings())]
    return {f"{parts[0]}.weight": f"{parts[1]}.weight"} if None not in parts else {}


def _with_floats(value: Any) -> Any:
    """Decode numbers that JSON lacks: transformers 5 writes infinity as {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        if len(value) == 1 and value.get("__float__") in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {name: _with_floats(item) for name, item in value.items()}
    return [_with_floats(item) for item in value] if isinstance(value, list) else value


def _rule(transform: Any) -> NameRule:
    """Convert a WeightTransform, whose fields transformers.core_model_loading defines, to plain data."""
    from transformers.core_model_loading import Concatenate, MergeModulelist, PrefixChange, WeightConverter, WeightRenaming

    sources, targets = tuple(transform.source_patterns), tuple(transform.target_patterns)
    scopes: tuple[str, ...] = ()
    if transform.scope_prefix is not None:
        scope = f"{transform.scope_prefix}." if transform.scope_prefix else ""
        base = f"{transform.base_model_prefix}." if transform.base_model_prefix else ""
        scopes = (base + scope, scope)
    operations = getattr(transform, "operations", ())
    steps = [(type(step), getattr(step, "dim", None)) for step in operations]
    if type(transform) in (WeightRenaming, PrefixChange) and len(targets) == 1:
        return Renaming(sources, targets[0], scopes)
    is_of_experts = type(transform) is WeightConverter and all(source.count("*.") == 1 for source in sources)
    is_stack = steps == [(MergeModulelist, 0), (Concatenate, 1)] or (steps == [(MergeModulelist, 0)] and len(sources) == 1)
    if is_of_experts and is_stack and len(targets) == 1:
        return ExpertStack(sources, targets[0], scopes)
    steps_text = ", ".join(type(step).__name__ for step in operations) or type(transform).__name__
    joins_rows = steps == [(Concatenate, 0)] and len(targets) == 1 and not any("*" in source for source in sources)
    return Unreadable(sources, targets, steps_text, scopes, joins_rows)

"""Reads the settings that a merge needs from the adapter_config.json of LoRA, rsLoRA and DoRA.

An adapter whose method changes more than the merge covers is refused, because a model that lacks a part of its adapter loads
without an error and gives wrong answers. The names and meanings of fields are those of LoraConfig in peft 0.21.2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from finetune_trainer.weights.errors import UnsupportedAdapterError
from finetune_trainer.weights.headers import TensorHeader

BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values (or prefixes) of `init_lora_weights` that make PEFT modify the base weights when training starts."""

REFUSED_FIELDS: Mapping[str, str] = {
    "layer_replication": "the merged model would have different layers from the base model",
    "use_qalora": "QA-LoRA pools its inputs and cannot be merged",
    "use_bdlora": "block-diagonal LoRA has another layout",
    "kasa_config": "KaSA truncates the base weights",
    "monteclora_config": "MonteCLoRA samples its weights",
    "arrow_config": "Arrow routes between adapters at run time",
    "alora_invocation_tokens": "activated LoRA switches itself on at run time and cannot be merged",
    "velora_config": "VeLoRA has another layout",
    "megatron_config": "Megatron layers are not transformers layers",
}
"""Fields of LoraConfig that make an adapter compute something other than LoRA, rsLoRA or DoRA -> why it cannot be merged."""

EMBEDDING_LAYER_NAMES = frozenset({"embed_tokens", "lm_head"})
"""Modules that PEFT treats as embeddings if ensure_weight_tying is set (peft.utils.other.EMBEDDING_LAYER_NAMES)."""


@dataclass(frozen=True)
class AdapterHeaders:
    """The tensors of an adapter's file, by name, and the content of its adapter_config.json."""

    tensors: Mapping[str, TensorHeader]
    config: Mapping[str, Any]
    copies: frozenset[str] = field(default_factory=frozenset)
    """Names of a tied parameter's adapter tensors that only repeat those of the parameter it is tied to (see inputs.py)."""


@dataclass(frozen=True)
class AdapterSettings:
    """The fields of LoraConfig that determine names, ranks and scalings. Modules are named as in the base model."""

    r: int
    lora_alpha: float
    use_rslora: bool
    use_dora: bool
    lora_bias: bool
    bias: str
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: tuple[str, ...] | str
    target_parameters: tuple[str, ...]
    exclude_modules: tuple[str, ...] | str
    modules_to_save: tuple[str, ...]
    layers: tuple[int, ...] | None
    """Indices of the layers to which target_modules is limited; None: all layers."""
    layers_pattern: tuple[str, ...]
    ties_embeddings: bool
    """Whether PEFT also applies the adapter of the input embeddings to the output embeddings (ensure_weight_tying)."""
    token_indices: tuple[int, ...] | Mapping[str, tuple[int, ...]] | None
    """Indices of trained rows. A tuple is for the input embeddings; the keys of a mapping are endings of module names."""

    def rank(self, name: str) -> int:
        """Return the rank of the adapter on the module (for target_parameters: the parameter) with this name."""
        return self.rank_pattern.get(_first_pattern(self.rank_pattern, name), self.r)

    def scaling(self, name: str) -> float:
        """Return the factor of B@A: alpha / r, or alpha / sqrt(r) for rsLoRA. Like PEFT, this computes it as a Python float."""
        alpha = self.alpha_pattern.get(_first_pattern(self.alpha_pattern, name), self.lora_alpha)
        rank = self.rank(name)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def targets(self, module: str) -> bool:
        """Whether PEFT puts an adapter on a module with this name, provided that it supports the module's class."""
        if _matches(self.exclude_modules, module):
            return False
        if any(re.match(rf"(^|.*\.){saved}($|\..*)", module) for saved in self.modules_to_save):
            return False
        if not _matches(self.target_modules, module):
            return False
        if self.layers is None or isinstance(self.target_modules, str) or module in self.target_modules:
            return True
        # Without a pattern, the first number in a module's name, after two or more parts, is its layer index.
        forms = [rf"(?:^|.*?\.){name}\.(?P<number>\d+)\." for name in self.layers_pattern]
        matches = (re.match(form, module) for form in forms or [r".*?\.[^.]*\.(?P<number>\d+)\."])
        match = next(filter(None, matches), None)
        return match is not None and int(match["number"]) in self.layers

    def targets_parameter(self, path: str) -> bool:
        """Whether target_parameters covers the parameter at `path`."""
        return _matches(self.target_parameters, path)

    def is_saved_whole(self, module: str) -> bool:
        """Whether `module` is one of `modules_to_save`, or inside one. The file stores the parameters of these modules whole."""
        parts = module.split(".")
        prefixes = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        return any(prefix.endswith(saved) for prefix in prefixes for saved in self.modules_to_save)

    def tokens_of(self, module: str, is_input_embedding: bool) -> tuple[int, ...] | None:
        """Return the indices of the trained rows of a module, or None if it has none."""
        if isinstance(self.token_indices, Mapping):
            return next((indices for name, indices in self.token_indices.items() if module.endswith(name)), None)
        return self.token_indices if is_input_embedding else None


def adapter_settings(config: Mapping[str, Any]) -> AdapterSettings:
    """Read the settings. Raises UnsupportedAdapterError, which names the field, its value, the reason and what to do."""
    for name, reason in REFUSED_FIELDS.items():
        if config.get(name):
            raise UnsupportedAdapterError(
                f"adapter_config.json: {name} is {config[name]!r}: {reason}. Train without it, or publish the adapter "
                "alone (merge.enabled: false)."
            )
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(BASE_CHANGING_INITS):
        raise UnsupportedAdapterError(
            f"adapter_config.json: init_lora_weights is {init!r}, which changed the base weights when training began, so the "
            "adapter does not fit the published base model. Save it with path_initial_model_for_weight_conversion, which turns "
            "it into a plain LoRA adapter."
        )
    if isinstance(init, str) and init.lower() == "mica":
        raise UnsupportedAdapterError(
            "adapter_config.json: init_lora_weights is 'mica', a variant with frozen lora_B. Train with another value, or "
            "publish the adapter alone (merge.enabled: false)."
        )
    layers, layers_pattern, tokens, targets = (
        config.get(name) for name in ("layers_to_transform", "layers_pattern", "trainable_token_indices", "target_modules")
    )
    if isinstance(layers, int):
        layers = (layers,)
    if isinstance(layers_pattern, str) and layers_pattern:
        layers_pattern = (layers_pattern,)
    targeted_embeddings = (
        [name for name in EMBEDDING_LAYER_NAMES if _matches(targets, name)]
        if isinstance(targets, str)
        else [name for name in targets or () if name.rpartition(".")[2] in EMBEDDING_LAYER_NAMES]
    )
    return AdapterSettings(
        r=int(config.get("r", 8)),
        lora_alpha=config.get("lora_alpha", 8),
        use_rslora=bool(config.get("use_rslora")),
        use_dora=bool(config.get("use_dora")),
        lora_bias=bool(config.get("lora_bias")),
        bias=config.get("bias") or "none",
        rank_pattern=dict(config.get("rank_pattern") or {}),
        alpha_pattern=dict(config.get("alpha_pattern") or {}),
        target_modules=_names(targets),
        target_parameters=tuple(config.get("target_parameters") or ()),
        exclude_modules=_names(config.get("exclude_modules")),
        modules_to_save=tuple(config.get("modules_to_save") or ()),
        layers=tuple(layers) if layers else None,
        layers_pattern=tuple(layers_pattern or ()),
        ties_embeddings=bool(config.get("ensure_weight_tying") and targeted_embeddings),
        token_indices={name: tuple(indices) for name, indices in tokens.items()}
        if isinstance(tokens, Mapping)
        else (tuple(tokens) if tokens is not None else None),
    )


def _names(value: Any) -> tuple[str, ...] | str:
    return value if isinstance(value, str) else tuple(value or ())


def _matches(patterns: tuple[str, ...] | str, module: str) -> bool:
    """Whether patterns match a module's name, by PEFT's rule.

    A string is a regular expression for the whole name; a tuple holds names or ends of names.
    """
    if isinstance(patterns, str):
        return re.fullmatch(patterns, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in patterns)


def _first_pattern(patterns: Mapping[str, Any], module: str) -> str:
    """Return the first pattern that matches the end of the module's name, else the name (peft.utils.other.get_pattern_key)."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), module)

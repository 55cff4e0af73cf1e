"""adapter_config.json of LoRA's family -> the settings that a merge needs, or a refusal with the reason.

In: the parsed file. Out: AdapterSettings. An adapter whose method changes more than the merge covers is refused here, because
leaving out a part of an adapter gives a model that loads well and answers wrong. Field names and meanings: peft 0.21.2,
LoraConfig.
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
"""Prefixes of `init_lora_weights` that subtract from the base weights when training starts (peft LoraLayer.*_init)."""

REFUSED_FIELDS: Mapping[str, str] = {
    "layer_replication": "the merged model would have other layers than the base model",
    "use_qalora": "QA-LoRA pools its inputs and cannot be merged",
    "use_bdlora": "block-diagonal LoRA has another layout",
    "kasa_config": "KaSA truncates the base weights",
    "monteclora_config": "MonteCLoRA samples its weights",
    "arrow_config": "Arrow routes between adapters at run time",
    "alora_invocation_tokens": "activated LoRA switches itself on at run time and cannot be merged",
    "velora_config": "VeLoRA has another layout",
    "megatron_config": "Megatron layers are not transformers layers",
}
"""Fields of LoraConfig that, when set, change what an adapter computes beyond LoRA, rsLoRA and DoRA."""

EMBEDDING_LAYER_NAMES = frozenset({"embed_tokens", "lm_head"})
"""Modules that count as embeddings for ensure_weight_tying in PEFT (peft.utils.other.EMBEDDING_LAYER_NAMES)."""

_LAYER_NUMBER = re.compile(r".*?\.[^.]*\.(?P<number>\d+)\.")
"""The first numbered part of a module's name is its layer."""


@dataclass(frozen=True)
class AdapterHeaders:
    """One adapter as it is on disk: its tensors by name, and adapter_config.json."""

    tensors: Mapping[str, TensorHeader]
    config: Mapping[str, Any]
    copies: frozenset[str] = field(default_factory=frozenset)
    """Tensors of output embeddings whose values equal those of the input embeddings (inputs.py)."""


@dataclass(frozen=True)
class AdapterSettings:
    """The part of LoraConfig that decides names, ranks and scalings. Module names are those inside the base model."""

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
    """Layers that target_modules is limited to; None: all."""
    layers_pattern: tuple[str, ...]
    ties_embeddings: bool
    """Whether PEFT gives the output embeddings the adapter of the input embeddings (ensure_weight_tying)."""
    token_indices: tuple[int, ...] | Mapping[str, tuple[int, ...]] | None
    """Trained rows of the input embeddings, or of the modules whose names end with a key."""

    def rank(self, name: str) -> int:
        """Rank of the adapter on the module, or on the parameter for target_parameters, of this name."""
        return self.rank_pattern.get(_first_pattern(self.rank_pattern, name), self.r)

    def scaling(self, name: str) -> float:
        """Factor on B@A: alpha / r, or alpha / sqrt(r) for rsLoRA, as a Python float like in PEFT."""
        alpha = self.alpha_pattern.get(_first_pattern(self.alpha_pattern, name), self.lora_alpha)
        rank = self.rank(name)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def targets(self, module: str) -> bool:
        """Whether PEFT puts an adapter on a module of this name (if its class can hold one)."""
        if _matches(self.exclude_modules, module):
            return False
        if any(re.match(rf"(^|.*\.){saved}($|\..*)", module) for saved in self.modules_to_save):
            return False
        if not _matches(self.target_modules, module):
            return False
        is_limited = self.layers is not None and not isinstance(self.target_modules, str) and module not in self.target_modules
        return not is_limited or self._layer(module) in (self.layers or ())

    def targets_parameter(self, path: str) -> bool:
        """Whether PEFT puts an adapter on the parameter itself, whatever module holds it."""
        return _matches(self.target_parameters, path)

    def is_saved_whole(self, module: str) -> bool:
        """Whether `module` is in one of `modules_to_save`, which the adapter file holds as whole tensors."""
        parts = module.split(".")
        prefixes = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        return any(prefix.endswith(saved) for prefix in prefixes for saved in self.modules_to_save)

    def tokens_of(self, module: str, is_input_embedding: bool) -> tuple[int, ...] | None:
        """Indices of the trained rows of a module, or None if it has none."""
        if isinstance(self.token_indices, Mapping):
            return next((indices for name, indices in self.token_indices.items() if module.endswith(name)), None)
        return self.token_indices if is_input_embedding else None

    def _layer(self, module: str) -> int | None:
        if not self.layers_pattern:
            match = _LAYER_NUMBER.match(module)
        else:
            patterns = (re.match(rf"(?:^|.*?\.){name}\.(?P<number>\d+)\.", module) for name in self.layers_pattern)
            match = next((candidate for candidate in patterns if candidate), None)
        return int(match["number"]) if match else None


def adapter_settings(config: Mapping[str, Any]) -> AdapterSettings:
    """Read the settings. Raises UnsupportedAdapterError naming the field, its value, the reason and the way out."""
    for name, reason in REFUSED_FIELDS.items():
        if config.get(name):
            raise UnsupportedAdapterError(
                f"adapter_config.json: {name} is {config[name]!r}: {reason}. Train without it, or publish the adapter "
                "alone (merge.enabled: false)."
            )
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(BASE_CHANGING_INITS):
        raise UnsupportedAdapterError(
            f"adapter_config.json: init_lora_weights is {init!r}, which changed the base weights when training began, so "
            "that the adapter does not belong to the base model as published. Save it with "
            "path_initial_model_for_weight_conversion, which makes it a plain LoRA adapter."
        )
    if isinstance(init, str) and init.lower() == "mica":
        raise UnsupportedAdapterError(
            "adapter_config.json: init_lora_weights is 'mica', a variant with frozen lora_B. Train with another one, or publish "
            "the adapter alone (merge.enabled: false)."
        )
    layers = config.get("layers_to_transform")
    if isinstance(layers, int):
        layers = (layers,)
    tokens = config.get("trainable_token_indices")
    return AdapterSettings(
        r=int(config.get("r", 8)),
        lora_alpha=config.get("lora_alpha", 8),
        use_rslora=bool(config.get("use_rslora")),
        use_dora=bool(config.get("use_dora")),
        lora_bias=bool(config.get("lora_bias")),
        bias=config.get("bias") or "none",
        rank_pattern=dict(config.get("rank_pattern") or {}),
        alpha_pattern=dict(config.get("alpha_pattern") or {}),
        target_modules=_names(config.get("target_modules")),
        target_parameters=tuple(config.get("target_parameters") or ()),
        exclude_modules=_names(config.get("exclude_modules")),
        modules_to_save=tuple(config.get("modules_to_save") or ()),
        layers=tuple(layers) if layers else None,
        layers_pattern=_listed(config.get("layers_pattern")),
        ties_embeddings=bool(config.get("ensure_weight_tying")) and _has_embedding(config.get("target_modules")),
        token_indices={name: tuple(indices) for name, indices in tokens.items()}
        if isinstance(tokens, Mapping)
        else (tuple(tokens) if tokens is not None else None),
    )


def _has_embedding(targets: Any) -> bool:
    if isinstance(targets, str):
        return any(_matches(targets, name) for name in EMBEDDING_LAYER_NAMES)
    return any(name.rpartition(".")[2] in EMBEDDING_LAYER_NAMES for name in targets or ())


def _names(value: Any) -> tuple[str, ...] | str:
    return value if isinstance(value, str) else tuple(value or ())


def _listed(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) and value else tuple(value or ())


def _matches(patterns: tuple[str, ...] | str, module: str) -> bool:
    """Whether patterns match a module: a string is a regular expression over the whole name; a list holds names or ends of names
    (peft's rule).
    """
    if isinstance(patterns, str):
        return re.fullmatch(patterns, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in patterns)


def _first_pattern(patterns: Mapping[str, Any], module: str) -> str:
    """The first pattern that matches the end of the module name, or the name itself (peft.utils.other.get_pattern_key)."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), module)

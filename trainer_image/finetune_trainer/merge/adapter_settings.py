"""PURE. adapter_config.json -> what merging must know of it, or a refusal with the reason.

In: the parsed file. Out: AdapterSettings. An adapter whose method changes more than the merge arithmetic covers is
refused here, because leaving out a part of an adapter gives a model that loads well and answers wrong.
Field names and meanings: peft 0.21.2, LoraConfig.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finetune_trainer.merge.errors import UnsupportedAdapterError

BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of `init_lora_weights` that subtract from the base weights when training starts (peft LoraLayer.*_init)."""

REFUSED_FIELDS: Mapping[str, str] = {
    "target_parameters": "adapters on fused mixture-of-experts parameters need another arithmetic",
    "trainable_token_indices": "trained token rows are not part of the merge",
    "lora_bias": "biases on lora_B are not part of the merge",
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


@dataclass(frozen=True)
class AdapterSettings:
    """The part of LoraConfig that decides names, ranks and scalings. Module names are those inside the base model."""

    r: int
    lora_alpha: float
    use_rslora: bool
    use_dora: bool
    fan_in_fan_out: bool
    bias: str
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: tuple[str, ...] | str
    exclude_modules: tuple[str, ...] | str
    modules_to_save: tuple[str, ...]
    targets_all_layers: bool

    def rank(self, module: str) -> int:
        """Rank of the adapter on `module`."""
        return self.rank_pattern.get(_first_pattern(self.rank_pattern, module), self.r)

    def scaling(self, module: str) -> float:
        """Factor on B@A: alpha / r, or alpha / sqrt(r) for rsLoRA, as a Python float like in PEFT."""
        alpha = self.alpha_pattern.get(_first_pattern(self.alpha_pattern, module), self.lora_alpha)
        rank = self.rank(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def targets(self, module: str) -> bool:
        """True when PEFT puts an adapter on a module of this name (given that its class can hold one)."""
        if _matches(self.exclude_modules, module):
            return False
        return _matches(self.target_modules, module)

    def is_saved_whole(self, module: str) -> bool:
        """True when `module` lies in one of `modules_to_save`, which the adapter file holds as whole tensors."""
        parts = module.split(".")
        prefixes = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        return any(prefix.endswith(saved) for prefix in prefixes for saved in self.modules_to_save)


def adapter_settings(config: Mapping[str, Any]) -> AdapterSettings:
    """Raises UnsupportedAdapterError naming the field, its value, the reason and the way out."""
    peft_type = config.get("peft_type")
    if peft_type != "LORA":
        raise UnsupportedAdapterError(
            f"adapter_config.json: peft_type is {peft_type!r}; only LORA adapters (LoRA, rsLoRA, DoRA) can be merged. "
            "Publish the adapter alone (merge.enabled: false)."
        )
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
        raise UnsupportedAdapterError("adapter_config.json: init_lora_weights is 'mica', a variant with frozen lora_B.")
    targets = config.get("target_modules") or ()
    return AdapterSettings(
        r=int(config.get("r", 8)),
        lora_alpha=config.get("lora_alpha", 8),
        use_rslora=bool(config.get("use_rslora")),
        use_dora=bool(config.get("use_dora")),
        fan_in_fan_out=bool(config.get("fan_in_fan_out")),
        bias=config.get("bias") or "none",
        rank_pattern=dict(config.get("rank_pattern") or {}),
        alpha_pattern=dict(config.get("alpha_pattern") or {}),
        target_modules=targets if isinstance(targets, str) else tuple(targets),
        exclude_modules=_names(config.get("exclude_modules")),
        modules_to_save=tuple(config.get("modules_to_save") or ()),
        targets_all_layers=config.get("layers_to_transform") is None,
    )


def _names(value: Any) -> tuple[str, ...] | str:
    return value if isinstance(value, str) else tuple(value or ())


def _matches(patterns: tuple[str, ...] | str, module: str) -> bool:
    """A string is a regular expression over the whole name; a list holds names or ends of names (peft's rule)."""
    if isinstance(patterns, str):
        return re.fullmatch(patterns, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in patterns)


def _first_pattern(patterns: Mapping[str, Any], module: str) -> str:
    """The first pattern that matches the end of the module name, or the name itself (peft.utils.other.get_pattern_key)."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), module)

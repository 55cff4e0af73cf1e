"""PEFT's configuration of a case, as its manifest is documented."""

import re
from collections.abc import Mapping
from typing import Any

from peft import LoraConfig, PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from finetune_job.api.method import MethodType
from finetune_job.methods import METHODS, Family
from tests.sweep import added
from tests.sweep.architectures import ARCHITECTURES
from tests.sweep.case import Case

_INITS = {"ZeroB": True, "Random": False}
_NOT_PEFTS = ("autocast_adapter_dtype", "lora_plus_ratio")


def peft_config(case: Case) -> PeftConfig:
    """PEFT's configuration, field by field as the manifest writes it."""
    method = case.spec()["method"]
    kind = MethodType(method["type"])
    if METHODS[kind].family is Family.OTHER:
        chosen = PEFT_TYPE_TO_CONFIG_MAPPING[METHODS[kind].peft_type]
        settings = {_snake(name): _number(value) for name, value in method.get("settings", {}).items()}
        if METHODS[kind].targets_all_linear and "target_modules" in chosen.__dataclass_fields__:
            settings.setdefault("target_modules", "all-linear")
        if kind is MethodType.TRAINABLE_TOKENS and case.added:
            settings |= _token_settings(case, settings)
        config: PeftConfig = chosen(task_type="CAUSAL_LM", **settings)
        return config
    lora = {_snake(name): value for name, value in method.get("lora", {}).items()}
    for name in _NOT_PEFTS:
        lora.pop(name, None)
    lora.setdefault("r", 16)
    lora.setdefault("lora_alpha", 2 * lora["r"])
    lora["lora_dropout"] = float(lora.get("lora_dropout", 0))
    targets = lora.get("target_modules", [] if "target_parameters" in lora else ["all-linear"])
    lora["target_modules"] = "all-linear" if targets == ["all-linear"] else targets
    if case.added:
        names, is_tied = vocabulary(case)
        taken = {*lora.get("modules_to_save", ()), *targets}
        written = lora.get("trainable_token_indices", [])
        lora["trainable_token_indices"] = added.trained_rows(written, case.added, names, taken, is_tied=is_tied)
    if "init_lora_weights" in lora:
        lora["init_lora_weights"] = _INITS.get(lora["init_lora_weights"], lora["init_lora_weights"])
    return LoraConfig(task_type="CAUSAL_LM", use_dora=METHODS[kind].needs.magnitudes, **lora)


def vocabulary(case: Case) -> tuple[tuple[str, str], bool]:
    """Names of embedding and head, and whether they share their values."""
    architecture = ARCHITECTURES[case.values["architecture"]]
    return (architecture.embedding, architecture.head), bool(architecture.config.tie_word_embeddings)


def trains_added_rows(case: Case) -> bool:
    """Whether all rows of the case's added tokens can be trained, and are in what is published whatever the base has there."""
    kind = MethodType(case.values["method"])
    if METHODS[kind].family is Family.FULL:
        return True
    method = case.spec()["method"]
    settings = method.get("lora", method.get("settings", {}))
    (embedding, head), is_tied = vocabulary(case)
    saved = {embedding, head} & {*settings.get("modulesToSave", ())}
    adapted = {embedding, head} & {*settings.get("targetModules", ())}
    is_biased = ARCHITECTURES[case.values["architecture"]].has_biased_head
    if saved == {embedding, head}:
        return not adapted
    if METHODS[kind].family is Family.OTHER:
        is_told_others = kind is MethodType.TRAINABLE_TOKENS and "targetModules" in settings
        return kind is MethodType.TRAINABLE_TOKENS and not is_told_others and not saved and not is_biased
    if is_biased and head not in saved:
        return False
    return not adapted and not (is_tied and saved)


def _token_settings(case: Case, settings: Mapping[str, Any]) -> dict[str, Any]:
    """PEFT trains the same rows of all modules that it is told of."""
    names, is_tied = vocabulary(case)
    rows = sorted({*settings["token_indices"], *added.ids_of(case.added)})
    return {"token_indices": rows, **({} if is_tied else {"target_modules": settings.get("target_modules", [*names])})}


def _snake(name: str) -> str:
    return re.sub(r"([A-Z])", lambda match: f"_{match[1].lower()}", name)


def _number(value: Any) -> Any:
    if isinstance(value, str) and re.fullmatch(r"[0-9]+(\.[0-9]+)?", value):
        return float(value)
    return value

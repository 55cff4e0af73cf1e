"""Rules on settings that only LoRA and its variants have, such as scaling and initialisation, and on unusual dropout."""

from __future__ import annotations

from typing import Any

from finetune_job.api.method import ALL_LINEAR, LoraInit, LoraSpec
from finetune_job.method_settings import effective_settings
from finetune_job.methods import METHODS
from finetune_job.rules.rule import Problem, RuleContext, rule

_LORA = "method.lora"
_RANKS = f"{_LORA}.rankPattern"
_INIT = f"{_LORA}.initLoraWeights"
REFUSED_INITS = {
    LoraInit.CORDA: "it needs covariances of the layers' inputs, measured on the training data before the first step, which this "
    "trainer does not compute",
    LoraInit.LOFTQ: "it quantises the base itself and replaces its weights, so the adapter belongs to a different base model",
    LoraInit.EVA: "it needs activations of the training data before the first step, which this trainer does not compute",
}
"""Unsupported way to initialise an adapter -> the reason."""


@rule("orthogonal-odd-rank")
def orthogonal_odd_rank(context: RuleContext) -> Problem | None:
    """Refuse an odd rank that some adapter is certain to have. Preflight checks what patterns and all-linear match."""
    lora = context.lora
    ranks = lora.rank_pattern or {}
    used = {target: _rank_for(target, lora) for target in _adapted_names(lora)} if ranks else {"": lora.r}
    odd = [rank for rank in used.values() if rank is not None and rank % 2]
    if lora.init_lora_weights is not LoraInit.ORTHOGONAL or not odd:
        return None
    even: dict[str, Any] = {f"{_LORA}.r": lora.r + 1} if lora.r % 2 else {}
    if any(rank % 2 for rank in ranks.values()):
        even[_RANKS] = {key: rank + rank % 2 for key, rank in ranks.items()}
    return Problem(value=odd[0], field=f"{_LORA}.r" if lora.r in odd else _RANKS, changes=even)


def _adapted_names(lora: LoraSpec) -> list[str]:
    """Return the module names that are certain to get adapters; none if that depends on the model."""
    left_out = {*(lora.exclude_modules or ()), *(lora.modules_to_save or ()), ALL_LINEAR}
    return [name for name in lora.target_modules or () if name.isidentifier() and name not in left_out]


def _rank_for(target: str, lora: LoraSpec) -> int | None:
    """Return the rank of modules whose name ends in `target`; None if it depends on the rest of the name.

    PEFT uses the first key that matches the end of a module's name (peft/utils/other.py, get_pattern_key).
    """
    for key, rank in (lora.rank_pattern or {}).items():
        if key == target:
            return rank
        if not key.isidentifier():
            return None
    return lora.r


@rule("rslora-with-alpha")
def rslora_with_alpha(context: RuleContext) -> Problem | None:
    lora = context.lora
    if not lora.use_rslora or lora.lora_alpha is None or lora.lora_alpha < lora.r or lora.r < 4:
        return None
    factor = lora.r**0.5
    return Problem(
        value=lora.lora_alpha,
        message=f"loraAlpha / sqrt(r) is {lora.lora_alpha / factor:g}: {factor:g} times the scale that plain LoRA would have",
        fix=f"set {_LORA}.loraAlpha to about {round(lora.lora_alpha / factor) or 1} for the scale that plain LoRA has",
        field=f"{_LORA}.loraAlpha",
        changes={f"{_LORA}.loraAlpha": min(round(lora.lora_alpha / factor) or 1, lora.r - 1)},
    )


@rule("lora-init-not-supported")
def lora_init_not_supported(context: RuleContext) -> Problem | None:
    lora = context.spec.method.lora
    if lora is None or lora.init_lora_weights not in REFUSED_INITS:
        return None
    return Problem(
        value=lora.init_lora_weights,
        message=f"{lora.init_lora_weights} is refused: {REFUSED_INITS[lora.init_lora_weights]}",
        fix=f"remove {_INIT}, or set it to {', '.join(init for init in LoraInit if init not in REFUSED_INITS)}",
    )


@rule("decomposed-start-with-dora")
def decomposed_start_with_dora(context: RuleContext) -> Problem | None:
    lora, kind = context.lora, context.spec.method.type
    if not (lora.init_lora_weights.decomposes_base and METHODS[kind].needs.magnitudes):
        return None
    return Problem(
        value=lora.init_lora_weights,
        message=f"{lora.init_lora_weights} starts an adapter with a part of the weight, which a second, frozen adapter "
        f"subtracts; {kind} would divide by norms that include only the first",
        fix=f"remove {_INIT}, or set method.type to LoRA",
    )


@rule("dropout-unusual")
def dropout_unusual(context: RuleContext) -> Problem | None:
    method = context.spec.method
    settings = effective_settings(method.type, method.settings or {}) if not context.wrong_settings else {}
    dropouts = {f"method.settings.{name}": value for name, value in settings.items() if name.endswith("Dropout")}
    if method.lora is not None and method.lora.lora_dropout is not None:
        dropouts[f"{_LORA}.loraDropout"] = float(method.lora.lora_dropout)
    path = next((path for path, value in dropouts.items() if isinstance(value, float) and 0.5 <= value < 1), None)
    if path is None:
        return None
    return Problem(
        value=f"{dropouts[path]:g}",
        message="in each step half of what the adapter reads, or more, is replaced by zeros",
        fix=f'write a usual dropout, from "0" to "0.1", or remove {path}',
        field="method.settings" if path.startswith("method.settings") else path,
        changes={path: None},
    )

"""Adapters on parameters, above all on the stacked weights of experts."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from finetune_job.api.method import LoraInit, LoraSpec
from finetune_job.methods import METHODS, lora_kind
from finetune_job.rules.rule import Problem, Reproduction, RuleContext, rule

_PARAMETERS = "method.lora.targetParameters"
_DROPOUT, _INIT = "method.lora.loraDropout", "method.lora.initLoraWeights"
_LAYERS, _EXCLUDED, _TARGETS = "method.lora.layersToTransform", "method.lora.excludeModules", "method.lora.targetModules"
_TYPE, _VERSION = "method.type", "parallelism.fsdp.version"
_TESTS = "tests/pitfalls/test_experts.py"
_PEFT = "peft >= 0.17"


def _lora(context: RuleContext) -> LoraSpec | None:
    """Settings that adapt parameters; None where there are none."""
    lora = context.spec.method.lora
    return lora if lora is not None and lora.target_parameters else None


@rule(
    "target-parameters-conflict",
    "An adapter on a parameter has neither dropout nor magnitudes",
    reads=(_PARAMETERS, _TYPE, _DROPOUT, _INIT),
    sources=("peft: peft/tuners/lora/layer.py, ParamWrapper; LoraLayer.orthogonal_init, pissa_init",),
    reproduction=Reproduction(
        f"{_TESTS}::test_settings_that_parameters_do_not_take",
        "ValueError: lora.ParamWrapper does not work with lora_dropout != 0; the same of use_dora=True; of an orthogonal start "
        "and of PiSSA AttributeError: 'MixtralExperts' object has no attribute 'weight'",
    ),
    holds_for=_PEFT,
)
def target_parameters_conflict(context: RuleContext) -> Problem | None:
    lora = _lora(context)
    if lora is None:
        return None
    wrong: dict[str, tuple[Any, str, Any]] = {}
    kind = context.spec.method.type
    if METHODS[kind].needs.magnitudes:
        without = lora_kind(packs_base=METHODS[kind].packs_base, magnitudes=False)
        wrong[_TYPE] = (kind, f"{kind} has magnitudes for layers only", without)
    if lora.lora_dropout is not None and Decimal(lora.lora_dropout) != 0:
        wrong[_DROPOUT] = (lora.lora_dropout, "the adapter is added to the weights, so there is no input to drop from", None)
    if lora.init_lora_weights is LoraInit.ORTHOGONAL:
        wrong[_INIT] = (lora.init_lora_weights, "PEFT looks for a layer's weight to take the element type from", None)
    if lora.init_lora_weights.decomposes_base:
        wrong[_INIT] = (lora.init_lora_weights, "it decomposes the weights of layers, and a parameter has none", None)
    if not wrong:
        return None
    field, (value, _, _) = next(iter(wrong.items()))
    steps = [f"set {path} to {instead}" if path == _TYPE else f"remove {path}" for path, (_, _, instead) in wrong.items()]
    return Problem(
        field=field,
        value=value,
        message=f"not with targetParameters: {'; '.join(reason for _, reason, _ in wrong.values())}",
        fix=f"{' and '.join(steps)}, or remove {_PARAMETERS}",
        changes={path: instead for path, (_, _, instead) in wrong.items()},
    )


@rule(
    "target-parameters-all-layers",
    "Adapters on parameters are on those of all layers",
    reads=(_PARAMETERS, _LAYERS, _EXCLUDED, _TARGETS),
    sources=("peft: peft/tuners/tuners_utils.py, _inject_parameters (neither layers nor exclusions are looked at)",),
    reproduction=Reproduction(
        f"{_TESTS}::test_parameters_are_adapted_in_all_layers", "no error: the parameters of all layers get adapters"
    ),
    holds_for=_PEFT,
)
def target_parameters_all_layers(context: RuleContext) -> Problem | None:
    lora = _lora(context)
    if lora is None:
        return None
    field: str
    value: Any
    if lora.layers_to_transform is not None:
        field, value = _LAYERS, lora.layers_to_transform
    elif lora.exclude_modules is not None and not lora.target_modules:
        field, value = _EXCLUDED, lora.exclude_modules
    else:
        return None
    changes: dict[str, Any] = {field: None}
    if lora.exclude_modules is not None and not lora.target_modules:
        changes[_EXCLUDED] = None
    return Problem(
        field=field,
        value=value,
        message="PEFT does not look at it for targetParameters: the parameters of all layers get adapters, without a word",
        fix=f"remove {field}, or {_PARAMETERS}; to choose layers, name their parameters in full, as in "
        "model.layers.0.mlp.experts.down_proj",
        changes=changes,
    )


@rule(
    "fsdp1-target-parameters",
    "FSDP 1 cannot adapt parameters",
    reads=(_PARAMETERS, _VERSION),
    sources=(
        "peft: peft/tuners/lora/layer.py, ParamWrapper (parametrises the weight in each forward pass)",
        "torch: FSDP 1's views",
    ),
    reproduction=Reproduction(
        f"{_TESTS}::test_parameters_under_fsdp_1",
        "RuntimeError: Output 0 of View is a view and its base or another view of its base has been modified inplace",
    ),
    holds_for="torch >= 2.0, FSDP 1 only",
)
def fsdp1_target_parameters(context: RuleContext) -> Problem | None:
    if _lora(context) is None or context.plan.parallelism.fsdp.version != 1:
        return None
    return Problem(
        field=_VERSION,
        value=1,
        message="PEFT replaces an adapted parameter during the forward pass, and FSDP 1's are views of its flat one",
        fix=f"remove {_VERSION}: version 2 can",
        changes={_VERSION: None},
    )


RULES = (target_parameters_conflict, target_parameters_all_layers, fsdp1_target_parameters)

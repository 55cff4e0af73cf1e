"""The part of a plan that says what is trained."""

from __future__ import annotations

from typing import Any

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.method import ALL_LINEAR, LoraSpec, MethodType, QuantizationSpec, QuantType
from finetune_job.methods import METHODS, Family
from finetune_job.plan.choices import Choices, number
from finetune_job.plan.resolve_sharding import has_own_units
from finetune_job.plan.run_plan import (
    AdapterPlan,
    LoraPlan,
    MethodPlan,
    QuantizationPlan,
)
from finetune_job.sharding import holds_adapters_as_the_base

DEFAULT_QUANT_TYPE = QuantType.NF4
DEFAULT_DOUBLE_QUANT = True


def method_plan(spec: FineTuneJobSpec, choices: Choices) -> MethodPlan:
    kind = spec.method.type
    as_base = holds_adapters_as_the_base(kind, spec.parallelism.fsdp.version, own_units=has_own_units(spec))
    family = METHODS[kind].family
    return MethodPlan(
        type=kind,
        lora=_lora(spec.method.lora or LoraSpec(), kind, choices, as_base=as_base) if family is Family.LORA else None,
        adapter=AdapterPlan(
            settings={name: _in_order(value) for name, value in (spec.method.settings or {}).items()},
            autocast_adapter_dtype=not as_base,
        )
        if family is Family.OTHER
        else None,
        quantization=(
            quantization_plan(spec.method.quantization or QuantizationSpec(), choices) if kind is MethodType.QLORA else None
        ),
    )


def _lora(lora: LoraSpec, kind: MethodType, choices: Choices, *, as_base: bool) -> LoraPlan:
    pick = choices.pick
    return LoraPlan(
        r=lora.r,
        lora_alpha=pick("method.lora.loraAlpha", lora.lora_alpha, 2 * lora.r, "twice the rank"),
        lora_dropout=float(pick("method.lora.loraDropout", lora.lora_dropout, "0", "adapters seldom need dropout")),
        target_modules=tuple(
            pick("method.lora.targetModules", lora.target_modules, [], "targetParameters alone says what is adapted")
            if lora.target_parameters
            else pick("method.lora.targetModules", lora.target_modules, [ALL_LINEAR], "every linear layer but the output head")
        ),
        target_parameters=tuple(lora.target_parameters or ()),
        exclude_modules=tuple(lora.exclude_modules or ()),
        layers_to_transform=None if lora.layers_to_transform is None else tuple(lora.layers_to_transform),
        init_lora_weights=lora.init_lora_weights,
        modules_to_save=tuple(lora.modules_to_save or ()),
        trainable_token_indices=tuple(lora.trainable_token_indices or ()),
        rank_pattern=_in_order(lora.rank_pattern or {}),
        alpha_pattern=_in_order(lora.alpha_pattern or {}),
        lora_plus_ratio=number(lora.lora_plus_ratio),
        use_rslora=lora.use_rslora,
        use_dora=kind is MethodType.DORA,
        bias=lora.bias,
        autocast_adapter_dtype=pick(
            "method.lora.autocastAdapterDtype",
            lora.autocast_adapter_dtype,
            not as_base,
            "a flat unit has one element type" if as_base else "small updates vanish in 16 bits",
        ),
    )


def _in_order(value: Any) -> Any:
    """Patterns in the order of the alphabet: the first that matches counts, and neither Kubernetes nor adapter_config.json keeps
    any other.
    """
    return dict(sorted(value.items())) if isinstance(value, dict) else value


def quantization_plan(quantization: QuantizationSpec, choices: Choices) -> QuantizationPlan:
    """How a base is packed; `choices` collects what was left open."""
    return QuantizationPlan(
        bits=quantization.bits,
        quant_type=choices.pick(
            "method.quantization.quantType", quantization.quant_type, DEFAULT_QUANT_TYPE, "made for normal weights"
        ),
        double_quant=choices.pick(
            "method.quantization.doubleQuant", quantization.double_quant, DEFAULT_DOUBLE_QUANT, "saves 0.4 bits a weight"
        ),
        compute_dtype=quantization.compute_dtype,
        quant_storage=quantization.quant_storage,
    )

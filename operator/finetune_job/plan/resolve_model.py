"""Resolves the parts of a plan for the trained parameters, the quantisation of the base, and the sharding of the model."""

from __future__ import annotations

from typing import Any

from finetune_job.api.enumerations import Dtype
from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.method import ALL_LINEAR, LoraSpec, MethodType, QuantizationSpec, QuantType
from finetune_job.api.parallelism import AutoWrapPolicy, FsdpSpec, MixedPrecisionSpec
from finetune_job.api.training import Precision
from finetune_job.methods import METHODS, Family
from finetune_job.module_names import OUTPUT_HEADS, names_embedding
from finetune_job.plan.choices import Choices
from finetune_job.plan.method_plan import AdapterPlan, LoraPlan, MethodPlan, QuantizationPlan
from finetune_job.plan.run_plan import TRAINED_ROWS_FIELD, FsdpPlan, optional_float
from finetune_job.sharding import holds_adapters_as_the_base, needs_original_parameters, needs_own_units

DEFAULT_QUANT_TYPE = QuantType.NF4
DEFAULT_DOUBLE_QUANT = True
FUSED_BITS = 4
"""Number of bits of a quantised base that allows fused adapters; for 8 bits, PEFT uses a different class."""


def method_plan(spec: FineTuneJobSpec, choices: Choices, *, on_gpu: bool) -> MethodPlan:
    kind = spec.method.type
    as_base = holds_adapters_as_the_base(kind, spec.parallelism.fsdp.version, own_units=has_own_units(spec))
    # A unit gathers its weights when it is called, but a fused forward pass never calls the adapter's modules.
    own = spec.parallelism.fsdp.version == 1 and has_own_units(spec)
    quantization = (spec.method.quantization or QuantizationSpec()) if METHODS[kind].packs_base else None
    may_fuse = on_gpu and not own and (quantization is None or quantization.bits == FUSED_BITS)
    family = METHODS[kind].family
    if trains_added_rows(spec):
        given = spec.method.lora.trainable_token_indices if spec.method.lora is not None else None
        choices.leave(TRAINED_ROWS_FIELD, given, [], "preflight names the rows of model.addedTokens")
    return MethodPlan(
        type=kind,
        lora=_lora(spec.method.lora or LoraSpec(), kind, choices, as_base=as_base, may_fuse=may_fuse)
        if family is Family.LORA
        else None,
        adapter=AdapterPlan(
            settings={name: _sorted_mapping(value) for name, value in (spec.method.settings or {}).items()},
            autocast_adapter_dtype=not as_base,
        )
        if family is Family.OTHER
        else None,
        quantization=None if quantization is None else quantization_plan(quantization, choices),
    )


def _lora(lora: LoraSpec, kind: MethodType, choices: Choices, *, as_base: bool, may_fuse: bool) -> LoraPlan:
    pick = choices.pick
    dropout = float(pick("method.lora.loraDropout", lora.lora_dropout, "0", "adapters seldom need dropout"))
    can_fuse = may_fuse and not METHODS[kind].needs.magnitudes and not lora.init_lora_weights.decomposes_base
    is_fused = can_fuse and not pick(
        "method.lora.peftForward", lora.peft_forward, False, "casts factors instead of inputs, and adds in the second product"
    )
    reason = "small updates vanish in 16 bits"
    return LoraPlan(
        r=lora.r,
        lora_alpha=pick("method.lora.loraAlpha", lora.lora_alpha, 2 * lora.r, "twice the rank"),
        lora_dropout=dropout,
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
        rank_pattern=_sorted_mapping(lora.rank_pattern or {}),
        alpha_pattern=_sorted_mapping(lora.alpha_pattern or {}),
        lora_plus_ratio=optional_float(lora.lora_plus_ratio),
        use_rslora=lora.use_rslora,
        use_dora=METHODS[kind].needs.magnitudes,
        bias=lora.bias,
        autocast_adapter_dtype=pick(
            "method.lora.autocastAdapterDtype",
            lora.autocast_adapter_dtype,
            not as_base,
            "a flat unit has one element type" if as_base else f"{reason}; products take rounded copies" if is_fused else reason,
        ),
        fused_forward=is_fused,
    )


def _sorted_mapping(value: Any) -> Any:
    """Sort patterns alphabetically: the first match wins, and Kubernetes and adapter_config.json preserve no other order."""
    return dict(sorted(value.items())) if isinstance(value, dict) else value


def quantization_plan(quantization: QuantizationSpec, choices: Choices) -> QuantizationPlan:
    """Resolve the quantisation of the base. Defaults for unset values are recorded in `choices`."""
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


def has_own_units(spec: FineTuneJobSpec) -> bool:
    """Whether PEFT's wrap policy puts adapters into FSDP units of their own: as the user has set it, or else if it is needed."""
    fsdp = spec.parallelism.fsdp
    if fsdp.peft_wrap_policy is not None:
        return fsdp.peft_wrap_policy
    return needs_own_units(spec.method.type, fsdp.version, use_orig_params=fsdp.use_orig_params, trains_rows=_trains_rows(spec))


def _trains_rows(spec: FineTuneJobSpec) -> bool:
    """Whether some rows of an embedding or of an output head are trained while the others are frozen."""
    lora = spec.method.lora or LoraSpec()
    return lora.trainable_token_indices is not None or trains_added_rows(spec) or trains_added_rows_of_head(spec)


def trains_added_rows(spec: FineTuneJobSpec) -> bool:
    """Whether an adapter trains only the rows of added tokens, because nothing else in the job trains the embedding."""
    lora = spec.method.lora or LoraSpec()
    trained = (*(lora.modules_to_save or ()), *(lora.target_modules or ()))
    is_lora = METHODS[spec.method.type].family is Family.LORA
    return bool(spec.model.added_tokens) and is_lora and names_embedding(trained) is None


def trains_added_rows_of_head(spec: FineTuneJobSpec) -> bool:
    """Whether an adapter trains rows of added tokens in the output head only, because the embedding is trained in full and the
    head is not. Preflight refuses such a job if the head is tied to the embedding.
    """
    lora = spec.method.lora or LoraSpec()
    saved, targets = lora.modules_to_save or (), lora.target_modules or ()
    is_lora = METHODS[spec.method.type].family is Family.LORA
    names_head = any(name.rpartition(".")[2] in OUTPUT_HEADS for name in (*saved, *targets))
    # A saved module with an unknown name may be the head, so every name must be a known embedding.
    only_embeddings = bool(saved) and all(names_embedding([name]) is not None for name in saved)
    return bool(spec.model.added_tokens) and is_lora and only_embeddings and not names_head


def fsdp_plan(spec: FineTuneJobSpec, choices: Choices) -> FsdpPlan:
    fsdp: FsdpSpec = spec.parallelism.fsdp
    mixed = fsdp.mixed_precision or MixedPrecisionSpec()
    first, trains_rows = fsdp.version == 1, _trains_rows(spec)
    peft_policy = (
        choices.pick(
            "parallelism.fsdp.peftWrapPolicy",
            fsdp.peft_wrap_policy,
            has_own_units(spec),
            "trainable and frozen apart"
            if has_own_units(spec)
            else "all parameters are trained alike"
            if spec.method.type is MethodType.FULL
            else "adapters share the units of their layers",
        )
        if first
        else None
    )
    half = spec.training.precision is not Precision.FP32 and spec.model.dtype is not Dtype.FLOAT32
    param_dtype = mixed.param_dtype
    if param_dtype is None and spec.training.precision is Precision.BF16 and half:
        param_dtype = choices.pick("parallelism.fsdp.mixedPrecision.paramDtype", None, Dtype.BFLOAT16, "precision is bf16")
    return FsdpPlan(
        version=fsdp.version,
        auto_wrap_policy=choices.pick(
            "parallelism.fsdp.autoWrapPolicy", fsdp.auto_wrap_policy, AutoWrapPolicy.TRANSFORMER_BASED_WRAP, "a unit per layer"
        ),
        transformer_layer_cls_to_wrap=(
            None if fsdp.transformer_layer_cls_to_wrap is None else tuple(fsdp.transformer_layer_cls_to_wrap)
        ),
        min_num_params=fsdp.min_num_params,
        peft_wrap_policy=peft_policy,
        use_orig_params=(
            choices.pick(
                "parallelism.fsdp.useOrigParams",
                fsdp.use_orig_params,
                needs_original_parameters(own_units=peft_policy, trains_rows=trains_rows),
                "trained parameters next to frozen ones need it"
                if trains_rows
                else "each unit is all trained or all frozen"
                if peft_policy
                else "trained and frozen parameters may share a unit",
            )
            if first
            else None
        ),
        sync_module_states=(
            choices.pick("parallelism.fsdp.syncModuleStates", fsdp.sync_module_states, True, "all ranks start alike")
            if first
            else None
        ),
        reshard_after_forward=(
            None
            if first
            else choices.pick(
                "parallelism.fsdp.reshardAfterForward",
                fsdp.reshard_after_forward,
                None,
                "preflight chooses: false if a rank has memory for all weights, else true"
                if spec.parallelism.nodes * spec.parallelism.processes_per_node > 1
                else "one rank gathers nothing",
            )
        ),
        offload_params=fsdp.offload_params,
        param_dtype=param_dtype,
        reduce_dtype=choices.pick(
            "parallelism.fsdp.mixedPrecision.reduceDtype", mixed.reduce_dtype, Dtype.FLOAT32, "sums lose little precision"
        ),
    )

"""Spec + profile + defaults -> RunPlan. Every value that the user left open is chosen here, once, and recorded as a `Choice`."""

from __future__ import annotations

from typing import TypeVar

from finetune_job.api.base import Dtype, claim_path, size_bytes
from finetune_job.api.data import DataFormat, LossOn
from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.method import ALL_LINEAR, LoraSpec, MethodType, QuantizationSpec, QuantType
from finetune_job.api.model import Attention
from finetune_job.api.parallelism import AutoWrapPolicy, FsdpSpec, MixedPrecisionSpec
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.api.training import ActivationCheckpointing, Precision, Scheduler
from finetune_job.names import DEFAULT_PROFILE, workspace_claim_name
from finetune_job.plan.run_plan import (
    CheckpointPlan,
    Choice,
    DataPlan,
    EvaluationPlan,
    FsdpPlan,
    JobIdentity,
    LoraPlan,
    MergePlanSettings,
    MethodPlan,
    ModelPlan,
    ParallelismPlan,
    Placement,
    QuantizationPlan,
    RunPlan,
    TrainingPlan,
)

T = TypeVar("T")
LARGEST_CHOSEN_MICRO_BATCH = 8
"""Sequences; beyond this the memory of activations grows faster than the throughput."""


class _Choices:
    """Collects what was left open."""

    def __init__(self) -> None:
        self.made: list[Choice] = []

    def pick(self, field: str, given: T | None, otherwise: T, reason: str) -> T:
        if given is not None:
            return given
        self.made.append(Choice(field=f"spec.{field}", value=otherwise, reason=reason))
        return otherwise


def resolve(
    identity: JobIdentity, spec: FineTuneJobSpec, profile: FineTuneProfileSpec | None, profile_name: str | None = None
) -> RunPlan:
    """The plan of an accepted spec (one that no error finding of the rule book speaks against)."""
    choices = _Choices()
    return RunPlan(
        job=identity,
        model=ModelPlan(
            location=claim_path(spec.model.source),
            dtype=spec.model.dtype,
            attention=choices.pick("model.attention", spec.model.attention, Attention.SDPA, "keeps packed documents apart"),
            allow_remote_code=spec.model.allow_remote_code,
        ),
        data=_data(spec, choices),
        method=_method(spec, choices),
        training=_training(spec, choices),
        parallelism=ParallelismPlan(
            nodes=spec.parallelism.nodes,
            processes_per_node=spec.parallelism.processes_per_node,
            fsdp=_fsdp(spec, choices),
        ),
        checkpoint=CheckpointPlan(every_steps=spec.checkpoint.every_steps, keep=spec.checkpoint.keep),
        evaluation=EvaluationPlan(every_steps=spec.evaluation.every_steps),
        merge=MergePlanSettings(
            enabled=spec.merge.enabled and spec.method.type is not MethodType.FULL,
            dtype=spec.merge.dtype,
            max_shard_bytes=size_bytes(spec.merge.max_shard_size),
            num_prompts=spec.merge.verify.num_prompts,
            max_kl_divergence=_number(spec.merge.verify.max_kl_divergence),
            min_top1_agreement=_number(spec.merge.verify.min_top1_agreement),
        ),
        workspace=claim_path(
            f"pvc://{spec.workspace.claim_name or workspace_claim_name(identity.name)}/{identity.name}-{identity.uid[:8]}"
        ),
        output=claim_path(spec.output.destination),
        placement=None if profile is None else _placement(profile_name or spec.profile or DEFAULT_PROFILE, profile),
        choices=tuple(choices.made),
    )


def _number(text: str | None) -> float | None:
    return None if text is None else float(text)


def _data(spec: FineTuneJobSpec, choices: _Choices) -> DataPlan:
    completion = spec.data.format is DataFormat.PROMPT_COMPLETION
    return DataPlan(
        train=claim_path(spec.data.source),
        validation=claim_path(spec.data.validation.source) if spec.data.validation else None,
        format=spec.data.format,
        max_sequence_length=spec.data.max_sequence_length,
        packing=spec.data.packing,
        loss_on=choices.pick(
            "data.lossOn",
            spec.data.loss_on,
            LossOn.COMPLETION if completion else LossOn.ALL,
            "the prompt is given, not learnt" if completion else "plain text has no prompt",
        ),
    )


def _method(spec: FineTuneJobSpec, choices: _Choices) -> MethodPlan:
    kind = spec.method.type
    return MethodPlan(
        type=kind,
        lora=None
        if kind is MethodType.FULL
        else _lora(spec.method.lora or LoraSpec(), kind, choices, as_base=_holds_adapters_as_the_base(spec)),
        quantization=_quantization(spec.method.quantization or QuantizationSpec(), choices) if kind is MethodType.QLORA else None,
    )


def _lora(lora: LoraSpec, kind: MethodType, choices: _Choices, *, as_base: bool) -> LoraPlan:
    pick = choices.pick
    return LoraPlan(
        r=lora.r,
        lora_alpha=pick("method.lora.loraAlpha", lora.lora_alpha, 2 * lora.r, "twice the rank"),
        lora_dropout=float(pick("method.lora.loraDropout", lora.lora_dropout, "0", "adapters seldom need dropout")),
        target_modules=tuple(
            pick("method.lora.targetModules", lora.target_modules, [ALL_LINEAR], "every linear layer but the output head")
        ),
        modules_to_save=tuple(lora.modules_to_save or ()),
        rank_pattern=lora.rank_pattern or {},
        alpha_pattern=lora.alpha_pattern or {},
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


def _quantization(quantization: QuantizationSpec, choices: _Choices) -> QuantizationPlan:
    return QuantizationPlan(
        bits=quantization.bits,
        quant_type=choices.pick("method.quantization.quantType", quantization.quant_type, QuantType.NF4, "made for normal weights"),
        double_quant=choices.pick("method.quantization.doubleQuant", quantization.double_quant, True, "saves 0.4 bits a weight"),
        compute_dtype=quantization.compute_dtype,
        quant_storage=quantization.quant_storage,
    )


def _training(spec: FineTuneJobSpec, choices: _Choices) -> TrainingPlan:
    training = spec.training
    full = spec.method.type is MethodType.FULL
    per_rank = training.global_batch_size // world_size(spec)
    micro = choices.pick(
        "training.microBatchSize", training.micro_batch_size, chosen_micro_batch(per_rank), "largest divisor of the share of a rank"
    )
    return TrainingPlan(
        epochs=training.epochs,
        max_steps=training.max_steps,
        global_batch_size=training.global_batch_size,
        micro_batch_size=micro,
        gradient_accumulation_steps=per_rank // micro,
        learning_rate=float(
            choices.pick("training.learningRate", training.learning_rate, "2e-5" if full else "2e-4", "usual for this method")
        ),
        scheduler=choices.pick("training.scheduler", training.scheduler, Scheduler.COSINE, "ends at zero"),
        warmup_ratio=float(choices.pick("training.warmupRatio", training.warmup_ratio, "0.03", "Adam's moments settle first")),
        weight_decay=float(choices.pick("training.weightDecay", training.weight_decay, "0", "little is trained for long")),
        max_grad_norm=float(choices.pick("training.maxGradNorm", training.max_grad_norm, "1.0", "one bad batch cannot ruin a run")),
        precision=training.precision,
        activation_checkpointing=choices.pick(
            "training.activationCheckpointing",
            training.activation_checkpointing,
            ActivationCheckpointing.NONE,
            "recomputation costs an adapter run half again its time",
        ),
        seed=training.seed,
    )


def world_size(spec: FineTuneJobSpec) -> int:
    """Number of ranks."""
    return spec.parallelism.nodes * spec.parallelism.processes_per_node


def chosen_micro_batch(sequences_per_rank: int) -> int:
    """The largest divisor of a rank's share of the global batch, up to `LARGEST_CHOSEN_MICRO_BATCH`."""
    return max(size for size in range(1, LARGEST_CHOSEN_MICRO_BATCH + 1) if max(sequences_per_rank, 1) % size == 0)


def needs_peft_wrap_policy(spec: FineTuneJobSpec) -> bool:
    """Whether FSDP 1 has to put trainable leaves into units of their own.

    Flat parameters must be uniform in `requires_grad` (unless original parameters are kept) and always in element type, and
    adapters are held in float32 beside a base of 16 bits. DoRA reads its weights outside their unit, which original parameters
    under this policy do not allow.
    """
    fsdp = spec.parallelism.fsdp
    if fsdp.version != 1 or spec.method.type is MethodType.FULL:
        return False
    return not (spec.method.type is MethodType.DORA and fsdp.use_orig_params)


def _holds_adapters_as_the_base(spec: FineTuneJobSpec) -> bool:
    """Without a unit of its own under FSDP 1 an adapter can be flattened only in its base's element type.

    Not for DoRA: its magnitudes would stand still in 16 bits, so such a manifest is refused rather than trained to no effect.
    """
    fsdp = spec.parallelism.fsdp
    if fsdp.version != 1 or spec.method.type in (MethodType.FULL, MethodType.DORA):
        return False
    return not (needs_peft_wrap_policy(spec) if fsdp.peft_wrap_policy is None else fsdp.peft_wrap_policy)


def _fsdp(spec: FineTuneJobSpec, choices: _Choices) -> FsdpPlan:
    fsdp: FsdpSpec = spec.parallelism.fsdp
    mixed = fsdp.mixed_precision or MixedPrecisionSpec()
    first = fsdp.version == 1
    peft_policy = (
        choices.pick(
            "parallelism.fsdp.peftWrapPolicy", fsdp.peft_wrap_policy, needs_peft_wrap_policy(spec), "trainable and frozen apart"
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
            choices.pick("parallelism.fsdp.useOrigParams", fsdp.use_orig_params, not peft_policy, "what the wrap policy needs")
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
            else choices.pick("parallelism.fsdp.reshardAfterForward", fsdp.reshard_after_forward, True, "least memory")
        ),
        offload_params=fsdp.offload_params,
        param_dtype=param_dtype,
        reduce_dtype=choices.pick(
            "parallelism.fsdp.mixedPrecision.reduceDtype", mixed.reduce_dtype, Dtype.FLOAT32, "sums lose little"
        ),
    )


def _placement(name: str, profile: FineTuneProfileSpec) -> Placement:
    return Placement(
        profile=name,
        trainer_image=profile.trainer_image,
        image_pull_policy=profile.image_pull_policy,
        resources=profile.resources,
        gpu_resource_name=profile.gpu.resource_name if profile.gpu else None,
        service_account_name=profile.service_account_name,
        run_as_user=profile.run_as_user,
        fs_group=profile.fs_group,
        node_selector=profile.node_selector or {},
    )

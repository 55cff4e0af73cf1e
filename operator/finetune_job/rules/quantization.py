"""QLoRA and QDoRA: how the packed 4-bit weights are laid out in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from finetune_job.api.enumerations import MergeBase
from finetune_job.api.method import MethodType, QuantStorage
from finetune_job.methods import METHODS, Family, lora_kind
from finetune_job.plan.element_types import held_dtype
from finetune_job.plan.resolve_training import world_size
from finetune_job.rules.rule import OURS, Problem, Reproduction, RuleContext, rule
from finetune_job.sharding import SHARDED_BITS, Conflict, HeldParameter, may_separate_adapters, unit_conflict

_QUANTIZATION = "method.quantization"
_TYPE = "method.type"
_BITS = f"{_QUANTIZATION}.bits"
_STORAGE = f"{_QUANTIZATION}.quantStorage"
_PARAM_DTYPE = "parallelism.fsdp.mixedPrecision.paramDtype"
_DESTROYED = 'would be converted to {} as if they were numbers, which destroys them: "shape ... is invalid for input of size ..."'
_FSDP_QLORA = "bitsandbytes: docs/source/fsdp_qlora.md"


@rule(
    "quantization-without-qlora",
    "Only QLoRA and QDoRA have a quantised base",
    reads=(_TYPE, _QUANTIZATION),
    sources=("this product's API",),
    reproduction=Reproduction(
        "tests/pitfalls/test_no_effect.py::test_what_nothing_reads",
        "no error: the run's plan is the same with and without it",
    ),
    holds_for=OURS,
)
def quantization_without_qlora(context: RuleContext) -> Problem | None:
    method = context.spec.method
    entry = METHODS[method.type]
    if method.quantization is None or entry.packs_base:
        return None
    packed = lora_kind(packs_base=True, magnitudes=entry.needs.magnitudes)
    remove, pack = f"remove {_QUANTIZATION}", f"set {_TYPE} to {packed}"
    # LoRA on a quantised base is what QLoRA is, DoRA on one QDoRA; any other method would be given up for it.
    is_meant = entry.family is Family.LORA
    return Problem(
        field=_QUANTIZATION,
        value="set",
        message=f"{method.type} trains on the base as it is stored; the settings would be ignored and memory would not be saved",
        fix=f"{pack}, or {remove}" if is_meant else f"{remove}, or {pack}",
        changes=_as_packed(context, packed) if is_meant else {_QUANTIZATION: None},
    )


def _as_packed(context: RuleContext, kind: MethodType) -> dict[str, Any]:
    """The type, and what the rules below would change next in settings that nothing has read so far."""
    method = context.spec.method.model_copy(update={"type": kind})
    packed = replace(context, spec=context.spec.model_copy(update={"method": method}))
    found = [each.check(packed) for each in RULES if each.severity == "error"]
    next_changes = [change for finding in found if finding is not None for change in finding.changes]
    return {_TYPE: kind, **{change.field.removeprefix("spec."): change.value for change in next_changes}}


@rule(
    "quantization-bits",
    "Only a 4-bit base can be sharded",
    reads=("method.type", _BITS, "merge.base", "parallelism.nodes", "parallelism.processesPerNode"),
    sources=(
        "torch: torch/distributed/fsdp/_flat_param.py, _init_metadata (FSDP 1: integers cannot be flattened)",
        "bitsandbytes: bitsandbytes/nn/modules.py, Linear8bitLt (FSDP 2: the sharded parameter has lost its CB attribute)",
    ),
    reproduction=Reproduction(
        "tests/pitfalls/test_quantization.py::test_an_8_bit_base_cannot_be_sharded "
        "tests/pitfalls/test_dora.py::test_norms_of_an_8_bit_base_lose_its_scales",
        "FSDP 1: ValueError: Cannot flatten integer dtype tensors; FSDP 2: AttributeError: 'Parameter' object has no 'CB'; "
        "DoRA on one rank: AttributeError: 'NoneType' object has no attribute 'unsqueeze'",
    ),
    holds_for="bitsandbytes <= 0.50, both FSDP versions; one rank trains on 8 bits, but not with magnitudes (peft <= 0.21)",
)
def quantization_bits(context: RuleContext) -> Problem | None:
    spec = context.spec
    quantization, entry = spec.method.quantization, METHODS[spec.method.type]
    if quantization is None or not entry.packs_base or quantization.bits == SHARDED_BITS:
        return None
    if quantization.bits == 8 and entry.needs.magnitudes:
        return Problem(
            field=_BITS,
            value=quantization.bits,
            message=f"{spec.method.type} takes norms of the weights: on a CPU PEFT loses the scales of 8 bits when it reads "
            "them, and it advises against 8 bits everywhere",
            fix=f"set {_BITS} to 4",
            changes={_BITS: SHARDED_BITS},
        )
    if quantization.bits == 8 and world_size(spec) == 1:
        if not spec.merge.enabled or spec.merge.base is not MergeBase.DEQUANTIZED:
            return None
        return Problem(
            field="merge.base",
            value=spec.merge.base,
            message="only a 4-bit base can be written out as it was trained on",
            fix=f"set merge.base to Original, or {_BITS} to 4",
            changes={"merge.base": MergeBase.ORIGINAL},
        )
    reason = (
        'the 8-bit form is an integer that FSDP 1 cannot flatten ("Cannot flatten integer dtype tensors") and FSDP 2 takes apart'
        if quantization.bits == 8
        else "bitsandbytes has no such form"
    )
    return Problem(field=_BITS, value=quantization.bits, message=reason, fix=f"set {_BITS} to 4", changes={_BITS: SHARDED_BITS})


@rule(
    "fsdp1-qlora-integer-storage",
    "FSDP 1 cannot flatten integers",
    reads=("parallelism.fsdp.version", "method.type", _STORAGE),
    sources=("torch: torch/distributed/fsdp/_flat_param.py, _init_metadata", _FSDP_QLORA),
    reproduction=Reproduction(
        "tests/pitfalls/test_quantization.py::test_bytes_cannot_be_flattened", "ValueError: Cannot flatten integer dtype tensors"
    ),
    holds_for="torch >= 2.0, FSDP 1 only",
)
def fsdp1_qlora_integer_storage(context: RuleContext) -> Problem | None:
    plan = context.plan
    storage = plan.method.quantization.quant_storage if plan.method.quantization else None
    if storage is None:
        return None
    if unit_conflict((HeldParameter("packed", storage, is_trained=False),), plan.parallelism.fsdp) is not Conflict.INTEGERS:
        return None
    return Problem(
        field=_STORAGE,
        value=storage,
        message='packed weights stored as uint8 cannot be flattened: "Cannot flatten integer dtype tensors"',
        fix=f"set {_STORAGE} to the model's element type, or leave it out",
        changes={_STORAGE: held_dtype(plan)},
    )


@rule(
    "fsdp2-qlora-integer-storage",
    "Other trainers do not shard integer storage",
    severity="warning",
    reads=("parallelism.fsdp.version", "method.type", _STORAGE),
    sources=("accelerate: issue 3983, pull request 3987 (integer parameters are excluded from fully_shard)",),
    reproduction=Reproduction(
        "tests/pitfalls/test_accelerate.py::test_accelerate_leaves_bytes_unsharded",
        "a warning: Found non-floating frozen Params4bit. Excluding from FSDP2 sharding",
    ),
    applies_to="accelerate",
    holds_for="accelerate >= 1.15, FSDP 2; this trainer shards integers, too",
)
def fsdp2_qlora_integer_storage(context: RuleContext) -> Problem | None:
    plan = context.plan
    quantization = plan.method.quantization
    if quantization is None or quantization.quant_storage is not QuantStorage.UINT8 or plan.parallelism.fsdp.version != 2:
        return None
    return Problem(
        field=_STORAGE,
        value=quantization.quant_storage,
        message="works here; under FSDP 1 the same settings fail, and accelerate leaves integers out of the sharding, so that "
        "each rank keeps the whole packed base",
        fix=f"leave {_STORAGE} out: the model's element type works everywhere",
        changes={_STORAGE: None},
    )


@rule(
    "fsdp1-qlora-storage-not-model-dtype",
    "FSDP 1 cannot flatten two element types together",
    reads=(
        *("parallelism.fsdp.version", "parallelism.fsdp.autoWrapPolicy", "parallelism.fsdp.transformerLayerClsToWrap"),
        *("method.type", _STORAGE, "model.dtype", "training.precision"),
    ),
    sources=("torch: torch/distributed/fsdp/_flat_param.py, _init_metadata", _FSDP_QLORA),
    reproduction=Reproduction(
        "tests/pitfalls/test_quantization.py::test_storage_of_another_type_cannot_be_flattened",
        "ValueError: Must flatten tensors with uniform dtype",
    ),
    holds_for="torch >= 2.0, FSDP 1 only",
)
def fsdp1_qlora_storage_not_model_dtype(context: RuleContext) -> Problem | None:
    plan = context.plan
    storage = plan.method.quantization.quant_storage if plan.method.quantization else None
    fsdp, held = plan.parallelism.fsdp, held_dtype(plan)
    if storage in (None, QuantStorage.UINT8) or held is None or may_separate_adapters(fsdp):
        return None
    unit = HeldParameter("norm", held, is_trained=False), HeldParameter("packed", storage, is_trained=False)
    if unit_conflict(unit, fsdp) is not Conflict.ELEMENT_TYPES:
        return None
    return Problem(
        field=_STORAGE,
        value=storage,
        message=f"norms and embeddings are {held} and in one unit with packed weights stored as {storage}: "
        '"Must flatten tensors with uniform dtype"',
        fix=f"set {_STORAGE} to {held}, or leave it out",
        changes={_STORAGE: held},
    )


@rule(
    "qlora-storage-not-param-dtype",
    "Mixed precision would convert packed weights like numbers",
    reads=("parallelism.fsdp.version", _STORAGE, "model.dtype", "training.precision", _PARAM_DTYPE),
    sources=("torch: mixed precision casts every floating parameter of a unit, and packed 4-bit weights look like one",),
    reproduction=Reproduction(
        "tests/pitfalls/test_quantization.py::test_mixed_precision_destroys_packed_weights",
        "RuntimeError: the packed weight is converted like numbers and has half its size",
    ),
    holds_for="torch >= 2.0, both FSDP versions; under version 1 this trainer leaves 16 bits to autocast, and holds all in "
    "float32 where that is the type of the computation",
)
def qlora_storage_not_param_dtype(context: RuleContext) -> Problem | None:
    plan = context.plan
    param_dtype = plan.parallelism.fsdp.param_dtype
    if plan.parallelism.fsdp.version != 2 or plan.method.quantization is None or param_dtype is None:
        return None
    storage = plan.method.quantization.quant_storage
    if storage in (None, QuantStorage.UINT8) or str(storage) == str(param_dtype):
        return None
    return Problem(
        field=_STORAGE,
        value=storage,
        message=f"packed weights stored as {storage} {_DESTROYED.format(param_dtype)}",
        fix=f"leave {_STORAGE} out: packed weights are then stored in the type of the computation",
        changes={_STORAGE: None},
    )


RULES = (
    quantization_without_qlora,
    quantization_bits,
    fsdp1_qlora_integer_storage,
    fsdp2_qlora_integer_storage,
    fsdp1_qlora_storage_not_model_dtype,
    qlora_storage_not_param_dtype,
)

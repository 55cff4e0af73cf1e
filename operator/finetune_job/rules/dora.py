"""DoRA: magnitudes beside the low-rank update, computed from gathered weights."""

from __future__ import annotations

from finetune_job.api.base import Dtype
from finetune_job.api.method import MethodType
from finetune_job.rules.context import RuleContext
from finetune_job.rules.define import Problem, rule
from finetune_job.rules.effective import effective_plan, held_dtype
from finetune_job.rules.rule import Reproduction

_PEFT_POLICY = "parallelism.fsdp.peftWrapPolicy"
_ORIG_PARAMS = "parallelism.fsdp.useOrigParams"
_AUTOCAST = "method.lora.autocastAdapterDtype"


@rule(
    "fsdp1-dora-orig-params",
    "DoRA reads adapter weights outside their unit, where FSDP 1 holds a flat shard",
    reads=("parallelism.fsdp.version", _PEFT_POLICY, _ORIG_PARAMS, "method.type"),
    sources=("peft: peft/tuners/lora/dora.py, DoraLinearLayer.forward", "peft: issues 1737 and 1910, pull request 1806"),
    reproduction=Reproduction(
        "tests/pitfalls/test_dora.py::test_original_parameters_in_leaf_units_fail", "IndexError: tuple index out of range"
    ),
    holds_for="peft >= 0.12, FSDP 1 only; hidden with one rank, where nothing is sharded",
)
def fsdp1_dora_orig_params(context: RuleContext) -> Problem | None:
    plan = effective_plan(context)
    fsdp = plan.parallelism.fsdp
    if plan.method.type is not MethodType.DORA or fsdp.version != 1 or not (fsdp.use_orig_params and fsdp.peft_wrap_policy):
        return None
    return Problem(
        field=_ORIG_PARAMS,
        value=fsdp.use_orig_params,
        message="PEFT's wrap policy puts each adapter matrix into a unit of its own, and with useOrigParams true its weight is a "
        'one-dimensional shard outside the unit\'s forward, where DoRA reads its shape: "IndexError: tuple index out of range"',
        fix=f"set {_ORIG_PARAMS} to false and keep {_PEFT_POLICY} true, or use version 2",
        changes={_ORIG_PARAMS: False},
    )


@rule(
    "dora-16-bit-magnitude",
    "DoRA's magnitudes stand still in 16 bits",
    severity="warning",
    reads=("method.type", _AUTOCAST, "model.dtype", "training.precision"),
    sources=("trl: pull request 7268", "IEEE 754: a bfloat16 number near 1 has steps of 1/128, larger than usual updates"),
    reproduction=Reproduction(
        "tests/pitfalls/test_dora.py::test_magnitudes_stand_still_in_16_bits", "no error: the magnitudes never change"
    ),
    holds_for="every version",
)
def dora_16_bit_magnitude(context: RuleContext) -> Problem | None:
    plan = effective_plan(context)
    if plan.method.type is not MethodType.DORA or plan.method.lora is None or plan.method.lora.autocast_adapter_dtype:
        return None
    if held_dtype(plan) in (None, Dtype.FLOAT32):
        return None
    first = plan.parallelism.fsdp.version == 1
    return Problem(
        field=_AUTOCAST,
        value=False,
        message=f"magnitudes of about 1 in {held_dtype(plan)} cannot take updates as small as the learning rate: they keep their "
        "first value, and DoRA becomes LoRA",
        fix=f"remove {_AUTOCAST}: adapters are then held in float32"
        + (f"; FSDP 1 then needs {_PEFT_POLICY} true and {_ORIG_PARAMS} false" if first else ""),
        changes={_AUTOCAST: None} | ({_PEFT_POLICY: True, _ORIG_PARAMS: False} if first else {}),
    )


RULES = (fsdp1_dora_orig_params, dora_16_bit_magnitude)

"""Rules on the merge: which methods can be merged, the element type, the base and the verification."""

from __future__ import annotations

from decimal import Decimal

from finetune_job.api.enumerations import Dtype, MergeBase
from finetune_job.api.method import MethodType
from finetune_job.methods import METHODS, Family
from finetune_job.rules.rule import Problem, RuleContext, rule

_BASE = "merge.base"
_DTYPE = "merge.dtype"
_LEAST_DIVERGENCE = Decimal("1e-17")
"""A limit at or below this divergence rejects correct merges: small models merged in float32 reach 1e-16 to 6e-16."""


@rule("merge-dtype-overflow")
def merge_dtype_overflow(context: RuleContext) -> Problem | None:
    spec = context.spec
    if spec.method.type is MethodType.FULL or not spec.merge.enabled or spec.merge.dtype is not Dtype.FLOAT16:
        return None
    if spec.model.dtype in (None, Dtype.FLOAT16):
        return None
    return Problem(
        value=spec.merge.dtype,
        message=f"weights and, later, activations of a {spec.model.dtype} model can exceed 65504, the largest float16 number",
        fix=f"remove {_DTYPE}: the merged model then has the base's own type",
    )


@rule("verification-divergence-zero")
def verification_divergence_zero(context: RuleContext) -> Problem | None:
    merge = context.spec.merge
    written = merge.verify.max_kl_divergence
    # Other methods may only replace stored weights, such as those of a norm; such a merge involves no rounding.
    is_rounded = METHODS[context.spec.method.type].family is Family.LORA
    if written is None or Decimal(written) > _LEAST_DIVERGENCE or not merge.enabled or not is_rounded:
        return None
    return Problem(value=written)


@rule("merge-into-quantized")
def merge_into_quantized(context: RuleContext) -> Problem | None:
    merge = context.spec.merge
    if not merge.enabled or merge.base is not MergeBase.QUANTIZED:
        return None
    return Problem(value=merge.base)


@rule("merge-dequantized-without-qlora")
def merge_dequantized_without_qlora(context: RuleContext) -> Problem | None:
    merge = context.spec.merge
    kind = context.spec.method.type
    if not merge.enabled or merge.base is not MergeBase.DEQUANTIZED or METHODS[kind].packs_base:
        return None
    return Problem(
        value=merge.base,
        message=f"{kind} trains on the weights as they are stored: the merge would have nothing to unpack, and would fail "
        "after the training",
        fix=f"set {_BASE} to Original",
        changes={_BASE: MergeBase.ORIGINAL},
    )


@rule("merge-while-sharded")
def merge_while_sharded(context: RuleContext) -> Problem | None:
    merge = context.spec.merge
    if not merge.enabled or merge.base is not MergeBase.TRAINED:
        return None
    return Problem(value=merge.base)

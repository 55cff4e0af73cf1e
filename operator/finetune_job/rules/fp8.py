"""Products in FP8: what has none, and what makes them slow."""

from __future__ import annotations

from collections.abc import Iterator

from finetune_job.api.method import MethodType
from finetune_job.api.training import Precision
from finetune_job.rules.rule import OURS, Problem, RuleContext, rule

FP8_FIELD = "training.fp8"
_COMPILE, _PRECISION, _METHOD, _QUANTIZATION = "training.compile", "training.precision", "method.type", "method.quantization"


@rule(
    "fp8-not-possible",
    "FP8 is for products of bfloat16 with weights that are frozen and not packed",
    reads=(FP8_FIELD, _METHOD, _QUANTIZATION, _PRECISION),
    sources=(
        "this trainer: weights that are trained and packed ones are not rounded to FP8",
        "torch: torch.nn.functional.scaled_mm gives bfloat16 where each row has a scale",
    ),
    holds_for=OURS,
    in_preflight="a model without frozen linear layers of such sides, or one that is computed in float32",
    not_reproduced="products in FP8 need a GPU that has them, and the tests run on CPUs",
)
def fp8_not_possible(context: RuleContext) -> Problem | None:
    if not context.spec.training.fp8:
        return None
    reason = next(against_fp8(context), None)
    if reason is None:
        return None
    return Problem(
        field=FP8_FIELD,
        value=True,
        message=f"{reason}; FP8 is for bfloat16 products with the frozen weights of a base that is not packed",
        fix=f"set {FP8_FIELD} to false",
        changes={FP8_FIELD: False},
    )


def against_fp8(context: RuleContext) -> Iterator[str]:
    """Why nothing of a job can be computed in FP8."""
    method = context.plan.method
    if method.type is MethodType.FULL:
        yield f"{_METHOD} is Full, which trains every weight"
    if method.quantization is not None:
        yield f"{method.type} packs the base in {method.quantization.bits} bits"
    if context.spec.training.precision not in (None, Precision.BF16):
        yield f"{_PRECISION} is {context.spec.training.precision}"


@rule(
    "fp8-without-compile",
    "Without a compiler rounding to FP8 takes longer than its products save",
    reads=(FP8_FIELD, _COMPILE),
    sources=(
        "NVIDIA: NeMo AutoModel, FP8 training (torch.compile is needed for a gain)",
        "by calculation: rounding reads and writes 25 bytes of each value in place of 5 (finetune_memory/pace.py)",
    ),
    holds_for=OURS,
    severity="warning",
    not_reproduced="time is lost only on a GPU that has FP8, and the tests run on CPUs",
)
def fp8_without_compile(context: RuleContext) -> Problem | None:
    training = context.spec.training
    if not training.fp8 or training.compile:
        return None
    return Problem(
        field=_COMPILE,
        value=False,
        message=f"{FP8_FIELD} rounds both factors of each product; without compiled layers that takes several kernels over all "
        "tokens, and more time than FP8 saves",
        fix=f"set {_COMPILE} to true, or {FP8_FIELD} to false",
        changes={_COMPILE: True},
    )


RULES = (fp8_not_possible, fp8_without_compile)

"""Trainable and frozen parameters in one FSDP unit."""

from __future__ import annotations

from finetune_job.api.method import LoraBias
from finetune_job.rules.context import RuleContext
from finetune_job.rules.define import Problem, rule
from finetune_job.rules.effective import effective_plan
from finetune_job.rules.rule import Reproduction

_PEFT_POLICY = "parallelism.fsdp.peftWrapPolicy"
_ORIG_PARAMS = "parallelism.fsdp.useOrigParams"
_BIAS = "method.lora.bias"


@rule(
    "fsdp1-lora-mixed-requires-grad",
    "FSDP 1 cannot flatten frozen and trainable parameters together",
    reads=("parallelism.fsdp.version", _PEFT_POLICY, _ORIG_PARAMS, "method.type"),
    sources=(
        "torch: torch/distributed/fsdp/_flat_param.py, _init_metadata; _wrap_utils.py, _check_nested_wrapping",
        "peft: docs/source/accelerate/fsdp.md",
    ),
    reproduction=Reproduction(
        "tests/pitfalls/test_trainable.py::test_lora_in_flat_units_fails_without_pefts_policy",
        "ValueError: Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`",
    ),
    holds_for="torch >= 2.0, FSDP 1 only",
)
def fsdp1_lora_mixed_requires_grad(context: RuleContext) -> Problem | None:
    plan = effective_plan(context)
    fsdp = plan.parallelism.fsdp
    if plan.parallelism.fsdp.version != 1 or plan.method.lora is None or fsdp.use_orig_params or fsdp.peft_wrap_policy:
        return None
    return Problem(
        field=_PEFT_POLICY,
        value=fsdp.peft_wrap_policy,
        message="with useOrigParams false each unit becomes one flat parameter, which is trainable or frozen as a whole; without "
        'PEFT\'s wrap policy a layer mixes both: "Must flatten tensors with uniform `requires_grad`"',
        fix=f"set {_PEFT_POLICY} to true, or {_ORIG_PARAMS} to true, or use version 2",
        changes={_PEFT_POLICY: True},
    )


@rule(
    "fsdp1-trained-bias",
    "FSDP 1 cannot flatten a trained bias with its frozen weight",
    severity="warning",
    reads=("parallelism.fsdp.version", _ORIG_PARAMS, _BIAS),
    sources=("torch: torch/distributed/fsdp/_flat_param.py, _init_metadata", "peft: docs of LoraConfig.bias"),
    reproduction=Reproduction(
        "tests/pitfalls/test_trainable.py::test_trained_bias_fails_where_the_model_has_biases",
        "ValueError: Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`",
    ),
    holds_for="torch >= 2.0, FSDP 1 only, models whose layers have biases",
)
def fsdp1_trained_bias(context: RuleContext) -> Problem | None:
    plan = effective_plan(context)
    fsdp, lora = plan.parallelism.fsdp, plan.method.lora
    if plan.parallelism.fsdp.version != 1 or lora is None or lora.bias is LoraBias.NONE or fsdp.use_orig_params:
        return None
    return Problem(
        field=_BIAS,
        value=lora.bias,
        message="a trained bias shares its module with a frozen weight, which no wrap policy can part: a model whose layers have "
        "biases fails with useOrigParams false; preflight looks at the model",
        fix=f"set {_BIAS} to none, or use version 2",
        changes={_BIAS: "none"},
    )


RULES = (fsdp1_lora_mixed_requires_grad, fsdp1_trained_bias)

"""Saved state: its form, and which checkpoint becomes the result."""

from __future__ import annotations

from finetune_job.api.parallelism import StateDictType
from finetune_job.rules.context import RuleContext
from finetune_job.rules.define import OURS, Problem, rule
from finetune_job.rules.rule import Reproduction

_TYPE = "parallelism.fsdp.stateDictType"
_EVERY = "evaluation.everySteps"
_BEST = "evaluation.loadBestModelAtEnd"
_VALIDATION = "data.validation"
_API = ("this product's API",)


@rule(
    "local-state-dict",
    "A local state dict cannot be read back",
    reads=(_TYPE,),
    sources=("accelerate: accelerate/utils/dataclasses.py, FullyShardedDataParallelPlugin",),
    reproduction=Reproduction(
        "tests/pitfalls/test_checkpoints.py::test_fsdp_2_has_no_local_state_dict",
        "ValueError: FSDP2 does not support LOCAL_STATE_DICT",
    ),
    holds_for="accelerate >= 1.0, both FSDP versions",
)
def local_state_dict(context: RuleContext) -> Problem | None:
    written = context.spec.parallelism.fsdp.state_dict_type
    if written is not StateDictType.LOCAL_STATE_DICT:
        return None
    return Problem(
        field=_TYPE,
        value=written,
        message="FSDP 2 has no such form, and under FSDP 1 it holds each rank's flat shards, under names that no parameter has",
        fix=f"remove {_TYPE}: checkpoints are sharded and can be read by any number of ranks",
        changes={_TYPE: None},
    )


@rule(
    "best-model-without-validation",
    "The best checkpoint is found on held-out records",
    reads=(_BEST, _VALIDATION),
    sources=_API,
    reproduction=Reproduction(
        "tests/pitfalls/test_results.py::test_without_held_out_records_nothing_is_evaluated",
        "no error: the last checkpoint is exported, whatever it is worth",
    ),
    holds_for=OURS,
)
def best_model_without_validation(context: RuleContext) -> Problem | None:
    if not context.spec.evaluation.load_best_model_at_end or context.spec.data.validation is not None:
        return None
    return Problem(
        field=_BEST,
        value=True,
        message="without held-out records no checkpoint is better than another",
        fix=f"set {_VALIDATION}.source, or remove {_BEST}",
        changes={_BEST: None},
    )


@rule(
    "best-model-is-the-last",
    "One evaluation cannot choose between checkpoints",
    severity="warning",
    reads=(_BEST, _EVERY, "training.maxSteps"),
    sources=_API,
    reproduction=Reproduction(
        "tests/pitfalls/test_evaluation.py::test_one_evaluation_chooses_nothing",
        "no error: the last checkpoint is the only one that competes",
    ),
    holds_for=OURS,
)
def best_model_is_the_last(context: RuleContext) -> Problem | None:
    evaluation, steps = context.spec.evaluation, context.spec.training.max_steps
    every = evaluation.every_steps
    if not evaluation.load_best_model_at_end or context.spec.data.validation is None:
        return None
    if every is not None and (steps is None or every < steps):
        return None
    reason = f"{_EVERY} is unset" if every is None else f"the run has {steps} steps and is evaluated every {every}"
    return Problem(
        field=_BEST,
        value=True,
        message=f"NoEffect: {reason}, so only the last checkpoint is evaluated and the best is the last",
        fix=f"set {_EVERY} to less than the steps of the run, or remove {_BEST}",
        changes={_BEST: None},
    )


RULES = (
    local_state_dict,
    best_model_without_validation,
    best_model_is_the_last,
)

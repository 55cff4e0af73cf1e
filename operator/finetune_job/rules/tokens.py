"""Trained rows of the embedding."""

from __future__ import annotations

from finetune_job.api.enumerations import Dtype
from finetune_job.module_names import TOKEN_EMBEDDINGS
from finetune_job.plan.element_types import held_dtype
from finetune_job.rules.rule import Problem, Reproduction, RuleContext, rule
from finetune_job.sharding import Conflict, HeldParameter, unit_conflict

TOKENS = "method.lora.trainableTokenIndices"
_TARGETS, SAVED = "method.lora.targetModules", "method.lora.modulesToSave"
_VERSION, _ORIG_PARAMS = "parallelism.fsdp.version", "parallelism.fsdp.useOrigParams"
_AUTOCAST = "method.lora.autocastAdapterDtype"
_TESTS = "tests/pitfalls/test_tokens.py"


@rule(
    "trainable-token-repeated",
    "A token has one row",
    reads=(TOKENS,),
    sources=(
        "peft: peft/tuners/trainable_tokens/layer.py, get_merged_weights (index_copy of the rows)",
        "torch: Tensor.index_copy_",
    ),
    reproduction=Reproduction(
        f"{_TESTS}::test_a_repeated_token_has_two_rows", "no error: two rows are trained, and one of them counts"
    ),
    holds_for="peft >= 0.15",
)
def trainable_token_repeated(context: RuleContext) -> Problem | None:
    tokens = context.lora.trainable_token_indices or []
    repeated = sorted({token for token in tokens if tokens.count(token) > 1})
    if not repeated:
        return None
    return Problem(
        field=TOKENS,
        value=tokens,
        message=f"token {repeated[0]} is given more than once: each time has a row, and which of them counts is undefined",
        fix="give each token once",
        changes={TOKENS: sorted(set(tokens))},
    )


@rule(
    "trainable-tokens-overlap",
    "The embedding is trained in one way",
    reads=(TOKENS, _TARGETS, SAVED),
    sources=("peft: peft/peft_model.py, set_additional_trainable_modules; peft/tuners/trainable_tokens/layer.py",),
    reproduction=Reproduction(
        f"{_TESTS}::test_the_embedding_is_trained_in_one_way",
        "ValueError in the first pass: TrainableTokensLayer wraps an unknown layer type; TypeError: trainable_token_indices "
        "cannot be applied to modules of type Embedding",
    ),
    holds_for="peft >= 0.15",
)
def trainable_tokens_overlap(context: RuleContext) -> Problem | None:
    lora = context.lora
    if lora.trainable_token_indices is None:
        return None
    for field, names in ((SAVED, lora.modules_to_save or []), (_TARGETS, lora.target_modules or [])):
        both = [name for name in names if name.rsplit(".", 1)[-1] in TOKEN_EMBEDDINGS]
        if both:
            return Problem(
                field=field,
                value=names,
                message=f"{both[0]} is the embedding, of which trainableTokenIndices trains some rows; PEFT cannot do both",
                fix=f"remove {TOKENS}, or {both[0]} from {field}",
                changes={TOKENS: None},
            )
    return None


@rule(
    "fsdp1-trainable-tokens",
    "FSDP 1 holds the embedding and its trained rows in one unit",
    reads=(TOKENS, _VERSION, _ORIG_PARAMS, _AUTOCAST, "model.dtype", "training.precision"),
    sources=("torch: torch/distributed/fsdp/_flat_param.py, _init_metadata", "peft: peft/tuners/trainable_tokens/layer.py"),
    reproduction=Reproduction(
        f"{_TESTS}::test_trained_rows_under_fsdp_1",
        "ValueError: Must flatten tensors with uniform `requires_grad` or uniform dtype",
    ),
    holds_for="torch >= 2.0, FSDP 1 only",
)
def fsdp1_trainable_tokens(context: RuleContext) -> Problem | None:
    plan = context.plan
    if context.lora.trainable_token_indices is None or plan.method.lora is None:
        return None
    # Stored weights alone may tell the embedding's type; preflight looks at them.
    held = held_dtype(plan) or Dtype.FLOAT32
    rows = Dtype.FLOAT32 if plan.method.lora.autocast_adapter_dtype else held
    unit = HeldParameter("embedding", held, is_trained=False), HeldParameter("rows", rows, is_trained=True)
    match unit_conflict(unit, plan.parallelism.fsdp):
        case Conflict.ELEMENT_TYPES:
            reason = f"which cannot hold rows in float32 next to an embedding in {held}"
        case Conflict.REQUIRES_GRAD:
            reason = "which with useOrigParams false is trained or frozen as a whole"
        case _:
            return None
    return Problem(
        field=_VERSION,
        value=1,
        message=f"the rows are in one flat parameter with the embedding, {reason}",
        fix=f"remove {_VERSION}: version 2 holds them apart",
        changes={_VERSION: None},
    )


RULES = (trainable_token_repeated, trainable_tokens_overlap, fsdp1_trainable_tokens)

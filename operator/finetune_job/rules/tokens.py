"""Trained rows of the embedding."""

from __future__ import annotations

from finetune_job.api.enumerations import Dtype
from finetune_job.api.method import MethodType
from finetune_job.methods import METHODS, Family
from finetune_job.module_names import names_embedding
from finetune_job.plan.element_types import held_dtype
from finetune_job.plan.resolve_model import trains_added_rows, trains_added_rows_of_head
from finetune_job.rules.rule import Problem, Reproduction, RuleContext, rule
from finetune_job.sharding import Conflict, HeldParameter, unit_conflict

TOKENS = "method.lora.trainableTokenIndices"
ADDED = "model.addedTokens"
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
        both = names_embedding(names)
        if both is not None:
            return Problem(
                field=field,
                value=names,
                message=f"{both} is the embedding, of which trainableTokenIndices trains some rows; PEFT cannot do both",
                fix=f"remove {TOKENS}, or {both} from {field}",
                changes={TOKENS: None},
            )
    return None


@rule(
    "fsdp1-trainable-tokens",
    "FSDP 1 holds embedding or head and their trained rows in one unit",
    reads=(TOKENS, ADDED, SAVED, _TARGETS, _VERSION, _ORIG_PARAMS, _AUTOCAST, "model.dtype", "training.precision"),
    sources=("torch: torch/distributed/fsdp/_flat_param.py, _init_metadata", "peft: peft/tuners/trainable_tokens/layer.py"),
    reproduction=Reproduction(
        f"{_TESTS}::test_trained_rows_under_fsdp_1",
        "ValueError: Must flatten tensors with uniform `requires_grad` or uniform dtype",
    ),
    holds_for="torch >= 2.0, FSDP 1 only",
)
def fsdp1_trainable_tokens(context: RuleContext) -> Problem | None:
    plan = context.plan
    of_embedding = context.lora.trainable_token_indices is not None or trains_added_rows(context.spec)
    if plan.method.lora is None or not (of_embedding or trains_added_rows_of_head(context.spec)):
        return None
    module = "embedding" if of_embedding else "output head"
    # Stored weights alone may tell the type of embedding and head; preflight looks at them.
    held = held_dtype(plan) or Dtype.FLOAT32
    rows = Dtype.FLOAT32 if plan.method.lora.autocast_adapter_dtype else held
    unit = HeldParameter(module, held, is_trained=False), HeldParameter("rows", rows, is_trained=True)
    match unit_conflict(unit, plan.parallelism.fsdp):
        case Conflict.ELEMENT_TYPES:
            reason = f"which cannot hold rows in float32 next to others in {held}"
        case Conflict.REQUIRES_GRAD:
            reason = "which with useOrigParams false is trained or frozen as a whole"
        case _:
            return None
    return Problem(
        field=_VERSION,
        value=1,
        message=f"the trained rows are in one flat parameter with the other rows of the {module}, {reason}",
        fix=f"remove {_VERSION}: version 2 holds them apart",
        changes={_VERSION: None},
    )


@rule(
    "added-token-repeated",
    "A token is added once",
    reads=(ADDED,),
    sources=("tokenizers: AddedVocabulary.add_tokens",),
    reproduction=Reproduction(
        f"{_TESTS}::test_a_token_is_added_once", "no error: one token, whose settings are those of the last time"
    ),
    holds_for="tokenizers >= 0.13",
)
def added_token_repeated(context: RuleContext) -> Problem | None:
    tokens = context.spec.model.added_tokens or []
    contents = [token.content for token in tokens]
    repeated = next((content for content in contents if contents.count(content) > 1), None)
    if repeated is None:
        return None
    once = [token for number, token in enumerate(tokens) if token.content not in contents[:number]]
    return Problem(
        field=ADDED,
        value=repeated,
        message=f"{repeated!r} is named more than once, and is one token all the same",
        fix="name each token once",
        changes={ADDED: [token.model_dump(mode="json", exclude_defaults=True) for token in once]},
    )


@rule(
    "added-tokens-untrained",
    "Rows of added tokens are trained, and an adapter holds them as they are",
    reads=(ADDED, "method.type", "method.settings"),
    sources=("peft: the tuners, which freeze all that they do not adapt", "transformers: resize_token_embeddings"),
    reproduction=Reproduction(
        f"{_TESTS}::test_rows_of_added_tokens_stay_what_they_began_as",
        "no error: after training the rows of added tokens are what they were before it",
    ),
    holds_for="peft >= 0.15",
)
def added_tokens_untrained(context: RuleContext) -> Problem | None:
    method = context.spec.method
    tokens, kind = context.spec.model.added_tokens, METHODS[method.type]
    if not tokens or kind.family is not Family.OTHER or kind.refused or method.type is MethodType.TRAINABLE_TOKENS:
        return None
    if (method.settings or {}).get("modulesToSave"):
        return None  # preflight knows whether these are the embeddings
    return Problem(
        field=ADDED,
        value=tokens[0].content,
        message=f"{method.type.value} trains no row of the embeddings, so added tokens would stay what they begin as",
        fix="set method.type: LoRA, which trains the rows of added tokens, or Full; or name the embeddings in "
        "method.settings.modulesToSave",
        changes={"method.type": MethodType.LORA.value, "method.settings": None},
    )


RULES = (
    trainable_token_repeated,
    trainable_tokens_overlap,
    fsdp1_trainable_tokens,
    added_token_repeated,
    added_tokens_untrained,
)

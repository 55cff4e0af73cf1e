"""Rules on added tokens and on trained rows of the embedding."""

from __future__ import annotations

from finetune_job.api.enumerations import Dtype
from finetune_job.api.method import MethodType
from finetune_job.methods import METHODS, Family
from finetune_job.module_names import names_embedding
from finetune_job.plan.element_types import held_dtype
from finetune_job.plan.resolve_model import trains_added_rows, trains_added_rows_of_head
from finetune_job.rules.rule import Problem, RuleContext, rule
from finetune_job.sharding import Conflict, HeldParameter, unit_conflict

TOKENS = "method.lora.trainableTokenIndices"
ADDED = "model.addedTokens"
_TARGETS, SAVED = "method.lora.targetModules", "method.lora.modulesToSave"
_VERSION = "parallelism.fsdp.version"


@rule("trainable-token-repeated")
def trainable_token_repeated(context: RuleContext) -> Problem | None:
    tokens = context.lora.trainable_token_indices or []
    repeated = sorted({token for token in tokens if tokens.count(token) > 1})
    if not repeated:
        return None
    return Problem(
        value=tokens,
        message=f"token {repeated[0]} is given more than once: each gets its own row, and it is undefined which row counts",
        fix="give each token once",
        changes={TOKENS: sorted(set(tokens))},
    )


@rule("trainable-tokens-overlap")
def trainable_tokens_overlap(context: RuleContext) -> Problem | None:
    lora = context.lora
    if lora.trainable_token_indices is None:
        return None
    for field, names in ((SAVED, lora.modules_to_save or []), (_TARGETS, lora.target_modules or [])):
        both = names_embedding(names)
        if both is not None:
            return Problem(
                value=names,
                message=f"{both} is the embedding, and trainableTokenIndices trains some of its rows; PEFT cannot do both",
                fix=f"remove {TOKENS}, or {both} from {field}",
                field=field,
                changes={TOKENS: None},
            )
    return None


@rule("fsdp1-trainable-tokens")
def fsdp1_trainable_tokens(context: RuleContext) -> Problem | None:
    plan = context.plan
    of_embedding = context.lora.trainable_token_indices is not None or trains_added_rows(context.spec)
    if plan.method.lora is None or not (of_embedding or trains_added_rows_of_head(context.spec)):
        return None
    module = "embedding" if of_embedding else "output head"
    # The types of the embedding and the head may depend on the stored weights, which only preflight reads.
    base_dtype = held_dtype(plan) or Dtype.FLOAT32
    rows = Dtype.FLOAT32 if plan.method.lora.autocast_adapter_dtype else base_dtype
    unit = HeldParameter(module, base_dtype, is_trained=False), HeldParameter("rows", rows, is_trained=True)
    match unit_conflict(unit, plan.parallelism.fsdp):
        case Conflict.ELEMENT_TYPES:
            reason = f"which cannot hold rows in float32 together with others in {base_dtype}"
        case Conflict.REQUIRES_GRAD:
            reason = "which with useOrigParams false is trained or frozen as a whole"
        case _:
            return None
    return Problem(
        value=1,
        message=f"the trained rows are in one flat parameter with the other rows of the {module}, {reason}",
        fix=f"remove {_VERSION}: version 2 stores them separately",
        field=_VERSION,
    )


@rule("added-token-repeated")
def added_token_repeated(context: RuleContext) -> Problem | None:
    tokens = context.spec.model.added_tokens or []
    contents = [token.content for token in tokens]
    repeated = next((content for content in contents if contents.count(content) > 1), None)
    if repeated is None:
        return None
    once = [token for number, token in enumerate(tokens) if token.content not in contents[:number]]
    return Problem(
        value=repeated,
        message=f"{repeated!r} is named more than once, but can only be one token",
        fix="name each token once",
        changes={ADDED: [token.model_dump(mode="json", exclude_defaults=True) for token in once]},
    )


@rule("added-tokens-untrained")
def added_tokens_untrained(context: RuleContext) -> Problem | None:
    method = context.spec.method
    tokens, kind = context.spec.model.added_tokens, METHODS[method.type]
    if not tokens or kind.family is not Family.OTHER or kind.refused or method.type is MethodType.TRAINABLE_TOKENS:
        return None
    if (method.settings or {}).get("modulesToSave"):
        return None  # only preflight knows whether these are the embeddings
    return Problem(
        value=tokens[0].content,
        message=f"{method.type.value} trains no row of the embeddings, so added tokens would keep their initial values",
        fix="set method.type: LoRA, which trains the rows of added tokens, or Full; or name the embeddings in "
        "method.settings.modulesToSave",
        changes={"method.type": MethodType.LORA.value, "method.settings": None},
    )

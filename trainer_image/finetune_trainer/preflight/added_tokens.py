"""Handles the tokens that the job adds: writes a base with them to the workspace, and checks that training learns them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import TypeAdapter

from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_job.method_settings import TARGETS, known_settings
from finetune_job.plan.run_plan import TRAINED_ROWS_FIELD, Choice, RunPlan
from finetune_trainer.added_tokens import FIELD, AddedTokens, BaseOrder, read_added_tokens, remove_made
from finetune_trainer.context import RunContext
from finetune_trainer.files import link_root
from finetune_trainer.preflight.inspection import Inspection
from finetune_trainer.preflight.model_process import ModelCheckError, answer_of, start_module
from finetune_trainer.preflight.token_rows import found_tokens
from finetune_trainer.processes.child import Child, parse_answer

log = logging.getLogger(__name__)
SAVED = "modulesToSave"
_SAVED_PART = ".modules_to_save."
_ROWS_PART = ".trainable_tokens_delta."
"""Part of the names of trained tensors that hold rows of a module. `_SAVED_PART` marks PEFT's copy of a whole module."""
_FINDINGS = TypeAdapter(list[Finding])
_FIX = f"its log says why; {FIELD} names the tokens"


def add_tokens(context: RunContext) -> tuple[list[Finding], AddedTokens | None]:
    """Writes the base with the job's added tokens to the workspace. Returns and raises the same as `make_base`."""
    plan, workspace = context.plan, context.workspace
    findings, added = make_base(
        BaseOrder.of(
            plan,
            base=context.source_model.absolute(),
            root=link_root(context.source_model, context.claims_root / plan.model.location.claim).absolute(),
            target=workspace.base_with_tokens.absolute(),
            record=workspace.added_tokens.absolute(),
        )
    )
    for content, number in ({} if added is None else added.id_of).items():
        log.info("%s: %r is token %d", FIELD, content, number)
    return findings, added


def make_base(order: BaseOrder) -> tuple[list[Finding], AddedTokens | None]:
    """Writes the base. Returns the findings or, if there are none, the added tokens. Raises ModelCheckError, OSError."""
    try:
        answered = answer_of(_start(order), "adds tokens to the base model", _FIX)
    except ModelCheckError:
        remove_made(order.record, order.target)  # also removes what a killed process had written
        raise
    try:
        findings = parse_answer(answered, _FINDINGS)
    except ValueError as error:
        raise ModelCheckError("the process that adds tokens answered with something other than findings", _FIX) from error
    return findings, None if findings else read_added_tokens(order.record)


def _start(order: BaseOrder) -> Child:
    return start_module("finetune_trainer.model.base_with_tokens", order.model_dump_json())


def chosen_rows(seen: Inspection) -> Iterable[Choice]:
    """Yields the choice of trained rows if the plan leaves it unset."""
    lora = seen.plan.method.lora
    if lora is not None and seen.plan.leaves_open(TRAINED_ROWS_FIELD):
        yield Choice(field=TRAINED_ROWS_FIELD, value=list(lora.trainable_token_indices), reason=f"the rows of {FIELD}")


def check_rows(seen: Inspection) -> Iterable[Finding]:
    """Checks that the rows of added tokens in embedding and output head are trained, and are published as they were trained."""
    added, plan = seen.added, seen.plan
    if added is None or seen.structure is None:
        return ()
    trained = [f".{name}." for name in seen.structure.trainable]
    of_module = {module: [name for name in trained if f".{module}." in name] for module in (added.embedding, added.head)}
    missing = [
        module
        for module, names in of_module.items()
        if not any(part in name for name in names for part in _holding_parts(plan, module, added.ids))
    ]
    is_one_saved = any(_SAVED_PART in name for names in of_module.values() for name in names)
    if added.separate_head is None and added.embedding not in missing and not is_one_saved:
        missing = []  # the head shares the trained rows
    adapted = [module for module in missing if any(_ROWS_PART not in name for name in of_module[module])]
    if not missing:
        row = seen.structure.padding_row
        return [
            make_finding(
                "added-tokens-untrained",
                field=FIELD,
                value=content,
                message=f"{content!r} is token {row}, pad_token_id in config.json, whose row torch leaves out as padding",
                fix="set pad_token_id in config.json of the base to a token that its tokenizer has",
            )
            for content, number in added.id_of.items()
            if number == row
        ]
    names = " and ".join(adapted or missing)
    if adapted:
        message = (
            f"the adapter of {names} would hold only changes of rows, and the initial rows of added tokens are not in the base "
            "as it is published"
        )
        fix = f"remove {names} from targetModules: the rows of added tokens are then trained by themselves"
    else:
        message = f"the method trains no row of {names}, so the added tokens would keep their initial values"
        fix = (
            "set spec.method.type to LoRA or a variant of it, which trains these rows, or to Full; or name "
            f"{names} in {SAVED}, both if embedding and head share their values"
        )
    changes = _not_adapted(plan, adapted) if adapted else _saved_whole(plan, missing)
    value = added.tokens[0].content
    return (make_finding("added-tokens-untrained", field=FIELD, value=value, message=message, fix=fix, changes=changes),)


def _holding_parts(plan: RunPlan, module: str, ids: Sequence[int]) -> tuple[str, ...]:
    """Returns the name parts that show that a module's trained tensor holds the rows of these tokens."""
    if not plan.method.trains_adapter:
        return ("",)
    lora = plan.method.lora
    # The job may train only the rows that it names; they suffice if all added tokens are among them.
    rows = ids if lora is None else lora.separate_token_rows.get(module, lora.trainable_token_indices)
    return (_SAVED_PART, _ROWS_PART) if {*ids} <= {*rows} else (_SAVED_PART,)


def _saved_whole(plan: RunPlan, modules: list[str]) -> dict[str, Any] | None:
    """Returns the changes that train the modules whole; None if the method has no such setting."""
    if plan.method.lora is not None:
        return {f"spec.method.lora.{SAVED}": [*plan.method.lora.modules_to_save, *modules]}
    if plan.method.adapter is None or SAVED not in known_settings(plan.method.type):
        return None
    return {f"spec.method.settings.{SAVED}": [*(plan.method.adapter.settings.get(SAVED) or ()), *modules]}


def _not_adapted(plan: RunPlan, modules: list[str]) -> dict[str, Any] | None:
    """Returns the changes that remove the modules from the targets; None if the targets do not list them by name."""
    method = plan.method
    named = method.lora.target_modules if method.lora is not None else method.adapter and method.adapter.settings.get(TARGETS)
    left = [name for name in named or () if name.rpartition(".")[2] not in modules]
    if not isinstance(named, Sequence) or len(left) == len(named):
        return None
    return {f"spec.method.{'lora' if method.lora is not None else 'settings'}.{TARGETS}": left or None}


def check_use(seen: Inspection) -> Iterable[Finding]:
    """Checks that the training records contain every added token."""
    added = seen.added
    # training_data() flushes buffers of the data, which only jobs with added tokens need at this point.
    prepared = None if added is None else seen.training_data()
    if added is None or prepared is None:
        return ()
    unread = sorted(set(added.ids) - found_tokens(prepared, added.ids))
    if not unread:
        return ()
    names = [content for content, number in added.id_of.items() if number in unread]
    left = [token.written() for token in added.tokens if token.content not in names]
    return (
        make_finding(
            "added-token-unread",
            field=FIELD,
            value=names[0],
            message=f"no training record holds {names[0]!r}, so nothing teaches the model what it means "
            f"({len(names)} such tokens)",
            fix="remove it from addedTokens, or add records that hold it",
            changes={FIELD: left or None},
        ),
    )

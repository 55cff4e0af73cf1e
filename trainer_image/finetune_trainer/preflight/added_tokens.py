"""Handles the tokens that the job adds: the base model with them is written to the workspace, and the data has to teach them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic import TypeAdapter

from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_job.method_settings import TARGETS, known_settings
from finetune_job.plan.run_plan import TRAINED_ROWS_FIELD, Choice, RunPlan
from finetune_trainer.added_tokens import FIELD, AddedTokens, BaseOrder, read_added_tokens, remove_made
from finetune_trainer.files import link_root
from finetune_trainer.preflight.checks import JobInspection, nothing_refused
from finetune_trainer.preflight.model_process import ModelCheckError, ModuleWork, answer_of
from finetune_trainer.preflight.token_rows import found_tokens
from finetune_trainer.processes.child import Child, parse_answer

log = logging.getLogger(__name__)
SAVED = "modulesToSave"
_SAVED_PART = ".modules_to_save."
_ROWS_PART = ".trainable_tokens_delta."
"""Parts of the names of trained tensors: PEFT's copy of a whole module, and rows of one."""
_FINDINGS = TypeAdapter(list[Finding])
_FIX = f"its log says why; {FIELD} names the tokens"


def add_tokens(seen: JobInspection) -> Iterable[Finding]:
    """Fills in `added` and makes the base with these tokens the model of all later checks. Raises as `make_base` does."""
    context = seen.context
    plan, workspace = context.plan, context.workspace
    if not plan.model.added_tokens:
        return ()
    order = BaseOrder.of(
        plan,
        base=context.source_model.absolute(),
        root=link_root(context.source_model, context.claims_root / plan.model.location.claim).absolute(),
        target=workspace.base_with_tokens.absolute(),
        record=workspace.added_tokens.absolute(),
    )
    found, seen.added = make_base(order)
    if seen.added is not None:
        seen.until_done.callback(_remove_if_refused, seen, order)
        seen.context = context.with_trained_rows()
        for content, number in seen.added.id_of.items():
            log.info("%s: %r is token %d", FIELD, content, number)
    return found


def _remove_if_refused(seen: JobInspection, order: BaseOrder) -> None:
    if not nothing_refused(seen):
        try:
            remove_made(order.record, order.target)
        except OSError:  # why the job is refused is more important
            log.exception("%s could not be removed", order.target)


def make_base(order: BaseOrder) -> tuple[list[Finding], AddedTokens | None]:
    """Returns the findings and, if the base could be made, its added tokens. Raises ModelCheckError, OSError."""
    try:
        answered = answer_of(_start(order), "adds tokens to the base model", _FIX)
    except ModelCheckError:
        remove_made(order.record, order.target)  # of a process that was killed as much as it had written
        raise
    try:
        found = parse_answer(answered, _FINDINGS)
    except ValueError as error:
        raise ModelCheckError("the process that adds tokens answered with something else than findings", _FIX) from error
    return found, None if found else read_added_tokens(order.record)


def _start(order: BaseOrder) -> Child:
    return ModuleWork("finetune_trainer.model.base_with_tokens", (), order.model_dump_json().encode()).start()


def chosen_rows(seen: JobInspection) -> Iterable[Choice]:
    """Chooses which rows are trained if the plan leaves that open."""
    lora = seen.plan.method.lora
    if lora is not None and seen.plan.leaves_open(TRAINED_ROWS_FIELD):
        yield Choice(field=TRAINED_ROWS_FIELD, value=list(lora.trainable_token_indices), reason=f"the rows of {FIELD}")


def check_rows(seen: JobInspection) -> Iterable[Finding]:
    """Whether the rows of added tokens are trained, of embedding and output head, and published as they are then."""
    added, plan = seen.known_added, seen.plan
    trained = [f".{name}." for name in seen.known_structure.trainable]
    of_module = {module: [name for name in trained if f".{module}." in name] for module in (added.embedding, added.head)}
    missing = [module for module, names in of_module.items() if not _hold_rows(names, _holding_parts(plan, module, added.ids))]
    is_one_saved = any(_SAVED_PART in name for names in of_module.values() for name in names)
    if added.separate_head is None and added.embedding not in missing and not is_one_saved:
        missing = []  # the head shares what is trained
    adapted = [module for module in missing if any(_ROWS_PART not in name for name in of_module[module])]
    if not missing:
        return _padding(seen)
    names = " and ".join(adapted or missing)
    if adapted:
        message = (
            f"the adapter of {names} would hold how rows change, and not what the rows of added tokens begin as, which are not "
            "those of the base as it is published"
        )
        fix = f"remove {names} from targetModules: the rows of added tokens are then trained by themselves"
    else:
        message = f"the method trains no row of {names}, so the added tokens would stay what they begin as"
        fix = (
            "set spec.method.type to a kind of LoRA, which trains these rows, or to Full; or name "
            f"{names} in {SAVED}, as embedding and head that share their values both have to be"
        )
    changes = _not_adapted(plan, adapted) if adapted else _saved_whole(plan, missing)
    value = added.tokens[0].content
    return (make_finding("added-tokens-untrained", field=FIELD, value=value, message=message, fix=fix, changes=changes),)


def _padding(seen: JobInspection) -> Iterator[Finding]:
    """Warns if an added token got a spare row that the base's configuration names as its padding."""
    row = seen.known_structure.padding_row
    for content, number in seen.known_added.id_of.items():
        if number == row:
            yield make_finding(
                "added-tokens-untrained",
                field=FIELD,
                value=content,
                message=f"{content!r} is token {row}, pad_token_id in config.json, whose row torch leaves out as padding",
                fix="set pad_token_id in config.json of the base to a token that its tokenizer has",
            )


def _hold_rows(names: Sequence[str], parts: Sequence[str]) -> bool:
    """Whether trained tensors of a module are its rows themselves. names: the tensors' names. parts: parts of such names."""
    return any(part in name for name in names for part in parts)


def _holding_parts(plan: RunPlan, module: str, ids: Sequence[int]) -> tuple[str, ...]:
    """Returns the parts in the names of a module's trained tensors that hold the rows of these tokens."""
    if not plan.method.trains_adapter:
        return ("",)
    lora = plan.method.lora
    # The rows that the job has named may be all that is trained.
    rows = ids if lora is None else lora.separate_token_rows.get(module, lora.trainable_token_indices)
    return (_SAVED_PART, _ROWS_PART) if {*ids} <= {*rows} else (_SAVED_PART,)


def _saved_whole(plan: RunPlan, modules: list[str]) -> dict[str, Any] | None:
    """Returns None for a method without such a setting."""
    if plan.method.lora is not None:
        return {f"spec.method.lora.{SAVED}": [*plan.method.lora.modules_to_save, *modules]}
    if plan.method.adapter is None or SAVED not in known_settings(plan.method.type):
        return None
    return {f"spec.method.settings.{SAVED}": [*(plan.method.adapter.settings.get(SAVED) or ()), *modules]}


def _not_adapted(plan: RunPlan, modules: list[str]) -> dict[str, Any] | None:
    """Returns None if the modules are not named by the ends of their paths."""
    method = plan.method
    named = method.lora.target_modules if method.lora is not None else method.adapter and method.adapter.settings.get(TARGETS)
    left = [name for name in named or () if name.rpartition(".")[2] not in modules]
    if not isinstance(named, Sequence) or len(left) == len(named):
        return None
    return {f"spec.method.{'lora' if method.lora is not None else 'settings'}.{TARGETS}": left or None}


def check_use(seen: JobInspection) -> Iterable[Finding]:
    """Checks that the records hold the added tokens."""
    added = seen.known_added
    prepared = seen.known_data.readable_at(seen.context.workspace.prepared)
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
